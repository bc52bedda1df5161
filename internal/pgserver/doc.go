// Package pgserver runs a private, throw-away PostgreSQL server from the
// binaries installed on this machine: for tests that kill, freeze, restart or
// replicate their server, and for demonstrations. It needs neither Docker nor
// a configured server, works as root and as any user, and leaves nothing
// behind: the server ends with the process that started it (on Linux even if
// that one is killed), and the directory of a killed run is removed at the next
// start.
//
// Only this process's user can connect: the socket is in a closed directory,
// and TCP, if asked for, wants a random password.
package pgserver
