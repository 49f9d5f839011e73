"""Hand-written short answers for the chat examples that ask what something is."""

CONCEPTS = {
    "a generator": "A generator is a function that produces a series of values one at a time. It "
    "keeps its state between values and does its work only when the next value is asked for.",
    "an iterator": "An iterator is an object that returns the items of a collection one by one. It "
    "stops when no items are left.",
    "a list": "A list is an ordered collection of items that can be changed after it is created.",
    "a tuple": "A tuple is an ordered collection of items that cannot be changed.",
    "a dictionary": "A dictionary maps keys to values. Each key is unique and gives fast access to "
    "its value.",
    "a set": "A set is a collection of unique items without any order.",
    "a string": "A string is a sequence of characters. It is used to store text.",
    "an integer": "An integer is a whole number, such as 3 or 42.",
    "a function": "A function is a named piece of code that takes arguments and returns a result.",
    "a class": "A class describes a kind of object. It defines the data that its objects hold and "
    "the methods that work on the data.",
    "an object": "An object is a value that has data and methods. It is created from a class.",
    "a method": "A method is a function that belongs to an object or to a class.",
    "a module": "A module is a file of code that other code can import.",
    "a package": "A package is a collection of modules that are installed and used together.",
    "a variable": "A variable is a name that refers to a value.",
    "a loop": "A loop runs the same piece of code again and again until a condition is met.",
    "recursion": "Recursion is a way to solve a problem in which a function calls itself on a "
    "smaller part of the problem.",
    "an exception": "An exception is an event that interrupts the normal flow of a program when an "
    "error occurs. The program can catch it and handle the error.",
    "a decorator": "A decorator is a function that takes another function and returns a changed "
    "version of it.",
    "a closure": "A closure is a function that remembers the variables of the place where it was "
    "defined.",
    "a thread": "A thread is a sequence of instructions that runs inside a process. Threads of one "
    "process share the same memory.",
    "a process": "A process is a running program. It has its own memory and is managed by the "
    "operating system.",
    "a lock": "A lock protects data that several threads use. Only one thread can hold the lock at "
    "a time.",
    "a deadlock": "A deadlock happens when two threads wait for each other and neither of them can "
    "go on.",
    "a queue": "A queue is a collection in which the first item that was added is the first item "
    "that is removed.",
    "a stack": "A stack is a collection in which the last item that was added is the first item "
    "that is removed.",
    "a tree": "A tree is a data structure made of nodes. Each node has one parent and any number "
    "of children.",
    "a graph": "A graph is a set of nodes that are connected by edges.",
    "a hash table": "A hash table stores values under keys. It uses a hash function to find the "
    "place of each key quickly.",
    "a hash function": "A hash function turns data of any size into a number of a fixed size.",
    "an array": "An array is a block of items of the same type that are stored side by side.",
    "a pointer": "A pointer is a variable that holds the address of another value in memory.",
    "a cache": "A cache keeps copies of data that is needed often, so that it can be read faster.",
    "a KV cache": "A KV cache stores the keys and values of the tokens that a language model has "
    "already read, so that the model does not have to compute them again.",
    "a daemon": "A daemon is a program that runs in the background and serves requests.",
    "a server": "A server is a program that waits for requests from clients and answers them.",
    "a client": "A client is a program that sends requests to a server.",
    "a database": "A database is an organized collection of data that programs can search and "
    "change.",
    "a table": "A table is a set of rows in a database. Each row has the same columns.",
    "an index": "An index is a data structure that makes it faster to find rows in a table.",
    "a transaction": "A transaction is a group of changes that are applied together. Either all of "
    "the changes take effect or none of them do.",
    "a query": "A query is a request for data from a database.",
    "SQL": "SQL is a language for reading and changing the data in a database.",
    "Python": "Python is a programming language that is easy to read and to learn. It is used for "
    "many kinds of programs.",
    "Rust": "Rust is a programming language that is fast and checks the use of memory when the "
    "program is compiled.",
    "a compiler": "A compiler translates source code into machine code before the program runs.",
    "an interpreter": "An interpreter reads source code and runs it directly.",
    "an operating system": "An operating system manages the memory, the files and the devices of a "
    "computer and runs its programs.",
    "a kernel": "A kernel is the central part of an operating system. It controls the hardware.",
    "a file": "A file is a named piece of data that is stored on a disk.",
    "a directory": "A directory is a place in the file system that holds files and other "
    "directories.",
    "a socket": "A socket is one end of a connection over which two programs exchange data.",
    "a protocol": "A protocol is a set of rules that programs follow when they exchange data.",
    "HTTP": "HTTP is the protocol that web browsers and servers use to exchange requests and "
    "responses.",
    "JSON": "JSON is a text format for data. It is made of objects, arrays, strings and numbers.",
    "an API": "An API is a set of functions that a program offers to other programs.",
    "a library": "A library is a collection of code that other programs can use.",
    "a framework": "A framework is a library that calls your code and gives your program its "
    "structure.",
    "a bug": "A bug is a mistake in a program that makes it do the wrong thing.",
    "a test": "A test is a piece of code that checks that another piece of code works as expected.",
    "debugging": "Debugging is the work of finding and removing the mistakes in a program.",
    "version control": "Version control keeps the history of the changes to a set of files.",
    "a commit": "A commit is a saved set of changes in a version control system.",
    "an algorithm": "An algorithm is a list of steps that solves a problem.",
    "sorting": "Sorting is putting the items of a collection in order.",
    "binary search": "Binary search finds an item in a sorted list. It compares the item with the "
    "middle of the list and goes on with the half that can hold it.",
    "memory": "Memory is the part of a computer that holds the data that running programs use.",
    "a processor": "A processor is the part of a computer that carries out instructions.",
    "a GPU": "A GPU is a processor with many small cores that work in parallel. It is used for "
    "graphics and for machine learning.",
    "a byte": "A byte is a unit of data that is made of eight bits.",
    "a bit": "A bit is the smallest unit of data. It is either zero or one.",
    "a token": "A token is a small piece of text, such as a word or a part of a word, that a "
    "language model reads or writes.",
    "a language model": "A language model is a program that has learnt from text to predict the "
    "next token.",
    "a neural network": "A neural network is a function with many parameters that are learnt from "
    "examples.",
    "attention": "Attention is the part of a language model that lets each token look at the "
    "tokens before it.",
    "quantization": "Quantization stores numbers with fewer bits. It saves memory and loses some "
    "precision.",
    "a tokenizer": "A tokenizer splits text into tokens and turns them into numbers.",
    "machine learning": "Machine learning is a way to build programs that learn from examples.",
    "a regular expression": "A regular expression is a pattern that describes a set of strings.",
    "encryption": "Encryption changes data so that only someone with the right key can read it.",
    "a password": "A password is a secret word that proves who a user is.",
    "a network": "A network is a group of computers that can exchange data.",
    "a port": "A port is a number that tells which program on a computer a connection is for.",
    "a container": "A container runs a program together with everything that it needs, apart from "
    "the rest of the system.",
    "an event loop": "An event loop waits for events and calls the code that handles each of them.",
    "a coroutine": "A coroutine is a function that can pause and go on later. It lets other code "
    "run while it waits.",
    "a callback": "A callback is a function that is passed to other code and called later.",
    "a constructor": "A constructor is a method that prepares a new object.",
    "inheritance": "Inheritance lets a class take over the data and the methods of another class.",
    "garbage collection": "Garbage collection frees the memory of objects that are no longer used.",
    "a type": "A type tells which values a variable can hold and what can be done with them.",
    "a boolean": "A boolean is a value that is either true or false.",
    "a parameter": "A parameter is a name for a value that a function receives.",
    "an argument": "An argument is a value that is passed to a function when it is called.",
    "a log": "A log is a record of the events in a program.",
    "a parser": "A parser reads text and builds a structure that shows its meaning.",
    "a buffer": "A buffer is a piece of memory that holds data while it is moved from one place to "
    "another.",
    "a page": "A page is a block of memory of a fixed size.",
    "latency": "Latency is the time that passes between a request and its answer.",
    "throughput": "Throughput is the amount of work that is done in a given time.",
    "a semaphore": "A semaphore is a counter that limits how many threads can use a resource at "
    "the same time.",
    "an environment variable": "An environment variable is a named value that the operating system "
    "passes to a program.",
    "a web browser": "A web browser is a program that shows web pages.",
    "a star": "A star is a large ball of hot gas that shines in the sky.",
    "a river": "A river is a large stream of water that flows to the sea or to a lake.",
    "a falcon": "A falcon is a fast bird that hunts other animals.",
    "a compass": "A compass is a device that shows which way is north.",
    "a bridge": "A bridge is a structure that carries a road or a path over a river or a valley.",
    "a mutex": "A mutex is a lock that lets only one thread at a time use a piece of data.",
    "a race condition": "A race condition is a bug in which the result depends on which of two "
    "threads runs first.",
    "a linked list": "A linked list is a list in which each item holds a reference to the next "
    "one.",
    "a heap": "A heap is a tree in which each node is not larger than its children. It gives fast "
    "access to the smallest item.",
    "a virtual machine": "A virtual machine is a program that acts like a whole computer.",
    "a shell": "A shell is a program that reads commands and runs them.",
    "a script": "A script is a short program that is run by an interpreter.",
    "Linux": "Linux is a free operating system kernel. It runs on servers, phones and computers of "
    "many kinds.",
    "git": "Git is a version control system. It keeps the history of a project.",
    "a branch": "A branch is a line of work in a version control system.",
    "a schema": "A schema describes the structure of data, such as the columns of a table.",
    "a foreign key": "A foreign key is a column that refers to a row in another table.",
    "an abstract class": "An abstract class is a class that cannot be used to create objects. "
    "Other classes inherit from it.",
    "an interface": "An interface lists the methods that a class must have.",
    "a unit test": "A unit test checks one small part of a program.",
    "a scheduler": "A scheduler decides which task runs next.",
    "a signal": "A signal is a short message that the operating system sends to a process.",
    "a pipe": "A pipe passes the output of one program to the input of another.",
    "a URL": "A URL is the address of a resource on the web.",
    "a cookie": "A cookie is a small piece of data that a web site stores in the browser.",
    "compression": "Compression makes data smaller, so that it takes less room.",
    "a checksum": "A checksum is a number that shows whether data was changed or damaged.",
    "an embedding": "An embedding is a list of numbers that stands for the meaning of a token.",
    "a matrix": "A matrix is a table of numbers with rows and columns.",
    "a vector": "A vector is a list of numbers.",
    "a prime number": "A prime number is a whole number larger than one that can be divided only "
    "by one and by itself.",
    "a planet": "A planet is a large round body that moves around a star.",
    "an island": "An island is a piece of land that has water on all sides.",
    "a dolphin": "A dolphin is an animal that lives in the sea and breathes air.",
    "a lantern": "A lantern is a lamp that can be carried.",
}
