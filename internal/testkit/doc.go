// Package testkit is what the project's tests of whole Lockers share: databases with the
// schema, Lockers that end with their test, connections that fail on purpose, and waits
// for what the server shows.
//
//	database.go    databases, servers and transactions, and what the server has
//	locker.go      Lockers of each kind, and locks
//	monitor.go     Monitors and what they see
//	wait.go        waiting callers, and waiting for a condition
//	shares.go      shared locks
//	counter.go     which statements are sent, and how often
//	gate.go        transactions that wait before they commit
//	proxy.go       a network between a test and its server that loses, delays and cuts
//	hostile.go     settings of a server that a program must survive
//	saturation.go  Lockers whose callers never pause
package testkit
