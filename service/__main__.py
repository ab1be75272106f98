from service.daemon import main

if __name__ == "__main__":
    main()
