// Package stacks shows locks in the transactions of database/sql and of the libraries on top of
// it, with the drivers of pgx and lib/pq. Each function stands for itself, to be
// copied:
//
//	LockerBeside       a Locker, from the connection string of the *sql.DB
//	BookWithSQL        database/sql: LockSQLTx
//	BookWithSQLX       sqlx: the same
//	BookWithSQLC       sqlc: the same
//	BookWithBun        bun: the same
//	BookWithEnt        ent, with its feature sql/execquery: the same
//	BookWithGORM       GORM: the same, in the ConnPool of its transaction
//	BookWithSQLAlone   without this package: SELECT lock_tx(...)
//	ShipOnce           database/sql: ClaimSQLTx
//	Idempotent         net/http: a POST that clients repeat
//	PayWithPgx         pgx: AnswerTx, for that
//	PayWithSQL         database/sql: AnswerSQLTx, for that
//	SettleFenced       database/sql: a lease, and FenceSQL
//	SettleWithBun      bun: a lease, a fenced transaction and its commit in one call
//
// They book one of the seats of an event: count, then insert. There is no row to
// lock, for it is about rows that are not there yet. plain.sql does it in SQL.
//
// The tests beside them say what LockSQLTx does with each driver.
package stacks

import "errors"

// Seats is how many an event has.
const Seats = 10

// ErrFull means that all seats are taken.
var ErrFull = errors.New("all seats are taken")

// ErrBusy means that somebody else has locked the event for all of the time that
// one was ready to wait.
var ErrBusy = errors.New("busy, try again later")
