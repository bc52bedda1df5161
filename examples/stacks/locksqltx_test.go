package stacks_test

import (
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/lib/pq"

	"github.com/pgxlock/pgxlock"
)

// sqlState returns the SQLSTATE of the error that the driver returned, which has
// to be in the chain as it came.
func sqlState(err error) string {
	if e, ok := errors.AsType[*pq.Error](err); ok {
		return string(e.Code)
	}
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}

// aMoment is a short wait where nothing depends on how short it is.
const aMoment = pgxlock.MaxWait(20 * time.Millisecond)

func lock(t *testing.T, tx *sql.Tx, opts ...pgxlock.LockTxOption) {
	t.Helper()
	if err := pgxlock.LockSQLTx(t.Context(), tx, t.Name(), opts...); err != nil {
		t.Fatal(err)
	}
}

// refused wants the lock to be refused, and the error to say all there is to say.
func refused(t *testing.T, tx *sql.Tx, opts ...pgxlock.LockTxOption) {
	t.Helper()
	err := pgxlock.LockSQLTx(t.Context(), tx, t.Name(), opts...)
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatalf("%v: got %v, want ErrNotAcquired", opts, err)
	}
	if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Key != t.Name() || e.Kind != pgxlock.KindAdvisory {
		t.Errorf("the error is %#v", err)
	}
}

func TestLockExcludesOthersUntilItsTransactionEnds(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		for _, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
			holder, other := readCommitted(t, db), readCommitted(t, db)
			lock(t, holder)
			lock(t, holder) // again
			for _, mode := range []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared} {
				refused(t, other, mode, pgxlock.NoWait)
				refused(t, other, mode, aMoment)
			}
			if err := end(holder); err != nil {
				t.Fatal(err)
			}
			lock(t, other, pgxlock.NoWait)
			goesOn(t, other)
		}
	})
}

func TestSharedLockExcludesExclusiveOnesOnly(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		reader, another, writer := readCommitted(t, db), readCommitted(t, db), readCommitted(t, db)
		lock(t, reader, pgxlock.Shared)
		lock(t, another, pgxlock.Shared, pgxlock.NoWait)
		lock(t, another, pgxlock.Shared, aMoment)
		refused(t, writer, pgxlock.NoWait)
		refused(t, writer, aMoment)
		goesOn(t, reader)
		refused(t, writer, pgxlock.NoWait)
		goesOn(t, another)
		lock(t, writer, aMoment)
		refused(t, readCommitted(t, db), pgxlock.Shared, pgxlock.NoWait)
	})
}

// The lock is the server's: all callers that use its number use the same lock.
func TestLockIsTheSameByEveryWay(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		holder := readCommitted(t, d.open(t))
		lock(t, holder)
		for _, other := range drivers {
			tx := readCommitted(t, other.open(t))
			refused(t, tx, pgxlock.NoWait)
			if get[bool](t, tx, "SELECT lock_tx($1, '0')", t.Name()) {
				t.Errorf("%s: lock_tx got it as well", other.title)
			}
			if get[bool](t, tx, "SELECT pg_try_advisory_xact_lock(advisory_lock_key($1))", t.Name()) {
				t.Errorf("%s: PostgreSQL's own function got it as well", other.title)
			}
		}
	})
}

func TestWaitEndsWithTheGrant(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.MaxWait(patience)}, {pgxlock.Shared}} {
			holder, waiter := readCommitted(t, db), readCommitted(t, db)
			lock(t, holder)
			waiting := pid(t, waiter)
			granted := make(chan error, 1)
			go func() { granted <- pgxlock.LockSQLTx(t.Context(), waiter, t.Name(), opts...) }()
			waits(t, waiting)
			if err := holder.Commit(); err != nil {
				t.Fatal(err)
			}
			if err := <-granted; err != nil {
				t.Fatalf("%v: %v", opts, err)
			}
			goesOn(t, waiter)
		}
	})
}

func TestUpgradeIsRefusedAndTheTransactionGoesOn(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		tx := readCommitted(t, db)
		lock(t, tx, pgxlock.Shared)
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}} {
			if err := pgxlock.LockSQLTx(t.Context(), tx, t.Name(), opts...); !errors.Is(err, pgxlock.ErrDeadlock) {
				t.Errorf("%v: got %v, want ErrDeadlock", opts, err)
			}
		}
		lock(t, readCommitted(t, db), pgxlock.Shared, pgxlock.NoWait) // it is still shared
		goesOn(t, tx)
	})
}

func TestLockOfASavepointEndsWithIt(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		tx, other := readCommitted(t, db), readCommitted(t, db)
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}} {
			event := newID()
			rollBack := func() {
				t.Helper()
				exec(t, tx, "INSERT INTO bookings (event, guest) VALUES ($1, 'after it')", event)
				exec(t, tx, "ROLLBACK TO SAVEPOINT pgxlock")
				if n := get[int](t, tx, "SELECT count(*) FROM bookings WHERE event = $1", event); n != 0 {
					t.Errorf("%v: it was another savepoint, %d bookings are still there", opts, n)
				}
			}
			exec(t, tx, "SAVEPOINT pgxlock") // the name that LockSQLTx uses itself
			exec(t, tx, "INSERT INTO bookings (event, guest) VALUES ($1, 'before it')", event)
			lock(t, tx, opts...)
			refused(t, other, pgxlock.NoWait)
			rollBack()
			lock(t, other, pgxlock.NoWait)
			exec(t, tx, "INSERT INTO bookings (event, guest) VALUES ($1, 'before it')", event)
			refused(t, tx, aMoment)
			rollBack()
			exec(t, tx, "RELEASE SAVEPOINT pgxlock")
			if err := other.Rollback(); err != nil {
				t.Fatal(err)
			}
			other = readCommitted(t, db)
		}
		goesOn(t, tx)
	})
}

func TestTimeoutsAreAfterAWaitWhatTheyWereBefore(t *testing.T) {
	type timeouts struct{ lock, statement string }
	show := func(t *testing.T, q queryer) timeouts {
		t.Helper()
		return timeouts{get[string](t, q, "SHOW lock_timeout"), get[string](t, q, "SHOW statement_timeout")}
	}
	set := func(how, value string) string {
		return "SET " + how + " lock_timeout = '" + value + "'; SET " + how + " statement_timeout = '" + value + "'"
	}
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		holder := readCommitted(t, db)
		for _, value := range []string{"0", "30s", "1d"} {
			for _, busy := range []bool{false, true} {
				for _, how := range []string{"before it", "in it", "locally", "in a savepoint", "locally in a savepoint"} {
					name := value + " set " + how
					if busy {
						name += ", busy"
					}
					t.Run(name, func(t *testing.T) {
						if busy {
							lock(t, holder)
						}
						conn, err := db.Conn(t.Context())
						if err != nil {
							t.Fatal(err)
						}
						t.Cleanup(func() {
							exec(t, conn, "RESET ALL")
							conn.Close()
						})
						if how == "before it" {
							exec(t, conn, set("", value))
						}
						tx := begin(t, conn, sql.LevelReadCommitted)
						switch how {
						case "in it":
							exec(t, tx, set("", value))
						case "locally":
							exec(t, tx, set("LOCAL", value))
						case "in a savepoint":
							exec(t, tx, "SAVEPOINT mine; "+set("", value))
						case "locally in a savepoint":
							exec(t, tx, "SAVEPOINT mine; "+set("LOCAL", value))
						}
						before := timeouts{value, value}
						if got := show(t, tx); got != before {
							t.Fatalf("the test set %v, not %v", got, before)
						}
						for range 2 {
							if busy {
								refused(t, tx, aMoment)
							} else {
								lock(t, tx, aMoment)
							}
							if got := show(t, tx); got != before {
								t.Errorf("afterwards they are %v, want %v", got, before)
							}
						}
						goesOn(t, tx)
						want := before
						if how == "locally" || how == "locally in a savepoint" {
							want = timeouts{"0", "0"}
						}
						if got := show(t, conn); got != want {
							t.Errorf("after the transaction they are %v, want %v", got, want)
						}
					})
				}
			}
		}
	})
}

// The wait is shorter than a timeout that would abort the transaction.
func TestShortStatementTimeoutEndsTheWaitAndNotTheTransaction(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		lock(t, readCommitted(t, db))
		var err error
		for range 20 { // a machine may be too busy for the 50 ms that are left, or for what follows; it is not so every time
			tx := readCommitted(t, db)
			exec(t, tx, "SET LOCAL statement_timeout = '300ms'")
			if err = pgxlock.LockSQLTx(t.Context(), tx, t.Name(), pgxlock.MaxWait(patience)); errors.Is(err, pgxlock.ErrNotAcquired) {
				if _, err = tx.Exec("SET LOCAL statement_timeout = 0"); err == nil {
					goesOn(t, tx)
					return
				}
			}
			_ = tx.Rollback()
		}
		t.Errorf("got %v, want ErrNotAcquired and a transaction that goes on", err)
	})
}

// Without MaxWait the session's own timeout counts, and aborts the transaction as
// it does in every statement.
func TestSessionsLockTimeoutIsAnErrorOfTheServer(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		holder, tx := readCommitted(t, db), readCommitted(t, db)
		lock(t, holder)
		exec(t, tx, "SET LOCAL lock_timeout = '1ms'")
		err := pgxlock.LockSQLTx(t.Context(), tx, t.Name())
		if sqlState(err) != "55P03" || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("got %v", err)
		}
		aborted(t, tx)
	})
}

// aborted wants the transaction to be aborted, LockSQLTx to say so, and a
// rollback to end it.
func aborted(t *testing.T, tx *sql.Tx) {
	t.Helper()
	for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}} {
		err := pgxlock.LockSQLTx(t.Context(), tx, t.Name(), opts...)
		if sqlState(err) != "25P02" || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%v in an aborted transaction: got %v", opts, err)
		}
	}
	if err := tx.Rollback(); err != nil {
		t.Errorf("rollback: %v", err)
	}
}

func TestAbortedTransactionLocksNothing(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		tx := readCommitted(t, d.open(t))
		if _, err := tx.ExecContext(t.Context(), "SELECT 1/0"); err == nil {
			t.Fatal("the server can divide by zero")
		}
		aborted(t, tx)
	})
}

func TestTransactionThatIsOverLocksNothing(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		for _, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
			tx := readCommitted(t, db)
			if err := end(tx); err != nil {
				t.Fatal(err)
			}
			for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}} {
				if err := pgxlock.LockSQLTx(t.Context(), tx, t.Name(), opts...); !errors.Is(err, sql.ErrTxDone) {
					t.Errorf("%v: got %v, want sql.ErrTxDone", opts, err)
				}
			}
		}
	})
}

func TestNilTransactionIsAnError(t *testing.T) {
	t.Parallel()
	for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}, {pgxlock.Shared}} {
		err := pgxlock.LockSQLTx(t.Context(), nil, t.Name(), opts...)
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "lock" {
			t.Errorf("%v: got %v", opts, err)
		}
	}
}

func TestInvalidKeyIsRefusedAndTheTransactionGoesOn(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		tx := readCommitted(t, d.open(t))
		if err := pgxlock.LockSQLTx(t.Context(), tx, ""); err == nil {
			t.Error("locked an empty key")
		}
		goesOn(t, tx)
	})
}

func TestDeadlockIsTyped(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.MaxWait(patience)}} {
			keys := []string{t.Name() + ":a", t.Name() + ":b"}
			txs := []*sql.Tx{readCommitted(t, db), readCommitted(t, db)}
			for i, tx := range txs {
				if err := pgxlock.LockSQLTx(t.Context(), tx, keys[i]); err != nil {
					t.Fatal(err)
				}
			}
			type result struct {
				of  *sql.Tx
				err error
			}
			results := make(chan result, 2)
			for i, tx := range txs {
				go func() { results <- result{tx, pgxlock.LockSQLTx(t.Context(), tx, keys[1-i], opts...)} }()
			}
			// The server may give the victim's lock to the survivor before it tells the
			// victim; or, where only a savepoint was aborted, when all of it is.
			victim := <-results
			var survivor result
			if victim.err == nil {
				survivor, victim = victim, <-results
			}
			if err := victim.err; !errors.Is(err, pgxlock.ErrDeadlock) || sqlState(err) != "40P01" || errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%v: got %v", opts, err)
			}
			aborted(t, victim.of)
			if survivor.of == nil {
				survivor = <-results
			}
			if survivor.err != nil {
				t.Errorf("%v: the survivor: %v", opts, survivor.err)
			}
			goesOn(t, survivor.of)
		}
	})
}

// above READ COMMITTED

var snapshots = []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable}

// commit commits something.
func commit(t *testing.T, db *sql.DB) {
	t.Helper()
	exec(t, db, "INSERT INTO bookings (event, guest) VALUES ($1, 'somebody')", newID())
}

func TestLockThatIsYoungerThanTheSnapshotIsStaleAndTheTransactionGoesOn(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		for _, level := range snapshots {
			for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}, {pgxlock.Shared}} {
				tx := begin(t, db, level)
				exec(t, tx, "SELECT count(*) FROM bookings")
				commit(t, db)
				if err := pgxlock.LockSQLTx(t.Context(), tx, t.Name(), opts...); !errors.Is(err, pgxlock.ErrStaleSnapshot) {
					t.Errorf("%v, %v: got %v, want ErrStaleSnapshot", level, opts, err)
				}
				refused(t, readCommitted(t, db), pgxlock.NoWait) // it has the lock
				goesOn(t, tx)
			}
		}
	})
}

func TestStaleSnapshotThatIsAllowedIsNoError(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		for _, level := range snapshots {
			for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}} {
				tx := begin(t, db, level)
				exec(t, tx, "SELECT count(*) FROM bookings")
				commit(t, db)
				lock(t, tx, append(opts, pgxlock.AllowStaleSnapshot(true))...)
				goesOn(t, tx)
			}
		}
	})
}

func TestLockThatTheSnapshotWaitedForIsStale(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db := d.open(t)
		for _, level := range snapshots {
			holder := readCommitted(t, db)
			lock(t, holder)
			exec(t, holder, "INSERT INTO bookings (event, guest) VALUES ($1, 'somebody')", newID())
			waiter := begin(t, db, level)
			waiting := pid(t, waiter)
			got := make(chan error, 1)
			go func() { got <- pgxlock.LockSQLTx(t.Context(), waiter, t.Name()) }()
			waits(t, waiting)
			if err := holder.Commit(); err != nil {
				t.Fatal(err)
			}
			if err := <-got; !errors.Is(err, pgxlock.ErrStaleSnapshot) {
				t.Errorf("%v: got %v, want ErrStaleSnapshot", level, err)
			}
			goesOn(t, waiter)
		}
	})
}

// when the context ends

// Both drivers give up the connection, and with it the transaction and its locks:
// lib/pq cancels the statement and closes the connection, pgx closes it and
// cancels. Nothing is left behind in the server. A wait that the transaction must
// survive is one with MaxWait.
func TestContextThatEndsDuringTheWaitEndsTheTransaction(t *testing.T) {
	for name, contextOfTx := range map[string]func(ctx context.Context) context.Context{
		"the call's":            context.WithoutCancel,
		"the transaction's too": func(ctx context.Context) context.Context { return ctx },
	} {
		t.Run(name, func(t *testing.T) {
			withEachDriver(t, func(t *testing.T, d driver) {
				db := d.open(t)
				for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.MaxWait(patience)}} {
					holder := readCommitted(t, db)
					lock(t, holder)
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					waiter, err := db.BeginTx(contextOfTx(ctx), nil)
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = waiter.Rollback() })
					if err := pgxlock.LockSQLTx(ctx, waiter, t.Name()+" its own"); err != nil {
						t.Fatal(err)
					}
					waiting := pid(t, waiter)
					got := make(chan error, 1)
					go func() { got <- pgxlock.LockSQLTx(ctx, waiter, t.Name(), opts...) }()
					waits(t, waiting)
					cancel()

					// lib/pq reports what the server says to its cancel request.
					err = <-got
					if !errors.Is(err, context.Canceled) && sqlState(err) != "57014" || errors.Is(err, pgxlock.ErrNotAcquired) {
						t.Errorf("%v: got %v", opts, err)
					}
					if _, err := waiter.ExecContext(t.Context(), "SELECT 1"); !errors.Is(err, sqldriver.ErrBadConn) && !errors.Is(err, sql.ErrTxDone) {
						t.Errorf("%v: the next statement: %v", opts, err)
					}
					await(t, "SELECT NOT EXISTS (SELECT FROM pg_locks WHERE pid = $1)", waiting)
					if err := holder.Commit(); err != nil {
						t.Fatal(err)
					}
					next := readCommitted(t, db)
					lock(t, next, pgxlock.NoWait)
					goesOn(t, next)
				}
			})
		})
	}
}

func TestContextThatHasEndedLocksNothing(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		tx := readCommitted(t, d.open(t))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {aMoment}} {
			if err := pgxlock.LockSQLTx(ctx, tx, t.Name(), opts...); !errors.Is(err, context.Canceled) {
				t.Errorf("%v: got %v", opts, err)
			}
		}
		lock(t, readCommitted(t, d.open(t)), pgxlock.NoWait)
	})
}
