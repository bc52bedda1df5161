package pgxlock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/migrations"
)

// These examples run without a server: they use locks in memory. With the Locker of
// [pgxlock.NewLeaseLocker] the same calls exclude other processes.

func Example() {
	ctx := context.Background()
	locks := pgxlock.NewMemoryLocker() // in production: pgxlock.NewLeaseLocker(pool, nil)
	defer locks.Close(ctx)

	// Do waits for the lock, calls the function and releases the lock.
	err := locks.Do(ctx, "report:daily", func(ctx context.Context, lock *pgxlock.Lock) error {
		fmt.Println("building the report under", lock.Key())

		// A second caller skips the work, because the lock is held.
		ran, err := locks.TryDo(context.Background(), "report:daily", func(context.Context, *pgxlock.Lock) error {
			return errors.New("never called")
		})
		fmt.Println("the second caller ran:", ran)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// building the report under report:daily
	// the second caller ran: false
}

func ExampleNewMemoryLocker() {
	locks := pgxlock.NewMemoryLocker()
	defer locks.Close(context.Background())

	lock, err := locks.Acquire(context.Background(), "cache:warm")
	fmt.Println(err)
	_, err = locks.TryAcquire(context.Background(), "cache:warm")
	fmt.Println(errors.Is(err, pgxlock.ErrNotAcquired))
	fmt.Println(lock.Release(context.Background()))
	// Output:
	// <nil>
	// true
	// <nil>
}

// A transfer locks both accounts. Callers that name the same accounts in the other order do
// not deadlock.
func ExampleLocker_AcquireAll() {
	ctx := context.Background()
	locks := pgxlock.NewMemoryLocker()
	defer locks.Close(ctx)

	accounts, err := locks.AcquireAll(ctx, []string{"account:7", "account:3"})
	if err != nil {
		log.Fatal(err)
	}
	for _, lock := range accounts {
		fmt.Println(lock.Key())
	}
	_, err = locks.AcquireAll(ctx, []string{"account:3", "account:9"}, pgxlock.NoWait)
	if e, ok := errors.AsType[*pgxlock.Error](err); ok {
		fmt.Println("busy:", e.Key)
	}
	if err := accounts.Release(ctx); err != nil { // both at the same time
		log.Fatal(err)
	}
	// Output:
	// account:3
	// account:7
	// busy: account:3
}

// One process leads until it resigns; then another one does.
func ExampleLocker_Lead() {
	locks := pgxlock.NewMemoryLocker()
	defer locks.Close(context.Background())

	resigned := errors.New("resigned")
	err := locks.Lead(context.Background(), "scheduler", func(ctx context.Context, term *pgxlock.Lock) error {
		leaders, err := locks.Holders(ctx, "scheduler")
		if err != nil {
			return err
		}
		fmt.Println("the leader is at", leaders[0].Metadata)
		return resigned // or work until ctx ends
	}, pgxlock.Metadata("10.0.0.7"))
	fmt.Println(err)
	// Output:
	// the leader is at 10.0.0.7
	// resigned
}

// Two exports run at a time, over all processes.
func ExampleLocker_Semaphore() {
	locks := pgxlock.NewMemoryLocker()
	defer locks.Close(context.Background())
	exports, err := locks.Semaphore(2)
	if err != nil {
		log.Fatal(err)
	}
	first, err := exports.Acquire(context.Background(), "exports")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := exports.Acquire(context.Background(), "exports"); err != nil {
		log.Fatal(err)
	}
	ran, err := exports.TryDo(context.Background(), "exports", func(context.Context, *pgxlock.Lock) error { return nil })
	fmt.Println("a third one ran:", ran, err)

	first.Release(context.Background())
	ran, err = exports.TryDo(context.Background(), "exports", func(context.Context, *pgxlock.Lock) error { return nil })
	fmt.Println("after a release:", ran, err)
	// Output:
	// a third one ran: false <nil>
	// after a release: true <nil>
}

// Readers hold the lock together and exclude writers. With [pgxlock.NewLeaseLocker] they
// may be in different processes.
func ExampleMode() {
	locks := pgxlock.NewMemoryLocker()
	defer locks.Close(context.Background())
	read := func(ctx context.Context, _ *pgxlock.Lock) error {
		readers, err := locks.Holders(ctx, "catalogue")
		if err != nil {
			return err
		}
		fmt.Println(len(readers), readers[0].Mode)
		return nil
	}
	first, err := locks.Acquire(context.Background(), "catalogue", pgxlock.Shared)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := locks.Do(context.Background(), "catalogue", read, pgxlock.Shared); err != nil {
		fmt.Println(err)
	}
	_, err = locks.TryAcquire(context.Background(), "catalogue") // to write it
	fmt.Println(errors.Is(err, pgxlock.ErrNotAcquired))
	_ = first.Release(context.Background())
	_, err = locks.TryAcquire(context.Background(), "catalogue")
	fmt.Println(err)
	// Output:
	// 2 Shared
	// true
	// <nil>
}

// This number is the same as SELECT advisory_lock_key('invoice:42').
func ExampleAdvisoryID() {
	fmt.Println(pgxlock.AdvisoryID("invoice:42"))
	// Output: 6688477336110245193
}

// These examples need a server: they are compiled and shown, not run.
var (
	ctx   = context.Background()
	pool  *pgxpool.Pool
	db    *sql.DB
	locks *pgxlock.Locker
)

// A program makes one pool and one Locker at its start. Here a job writes its result only if
// the lock is still held.
func Example_program() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, nil); err != nil { // does nothing where the newest version is installed
		log.Fatal(err)
	}
	locks, err := pgxlock.NewLeaseLocker(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)

	err = locks.DoTx(ctx, pool, "report:daily", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
		_, err := tx.Exec(ctx, "INSERT INTO reports DEFAULT VALUES")
		return err
	})
	if err != nil {
		log.Print(err)
	}
}

// The lock ends with the transaction, so the next transaction sees what this one wrote.
func ExampleLockTx() {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pgxlock.LockTx(ctx, tx, "invoice:42", pgxlock.MaxWait(2*time.Second)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE invoices SET total = total + 10 WHERE id = 42")
		return err
	})
	if errors.Is(err, pgxlock.ErrNotAcquired) {
		log.Print("another transaction is still working on the invoice")
	}
}

// All accounts of a transfer are locked in one call, in an order that does not deadlock.
func ExampleLockAllTx() {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pgxlock.LockAllTx(ctx, tx, []string{"account:7", "account:3"}); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance - 10 WHERE id = 7"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance + 10 WHERE id = 3")
		return err
	})
	if err != nil {
		log.Print(err)
	}
}

// A queue may deliver a message twice. The claim commits together with the order, so only one
// delivery creates it.
func ExampleClaimTx() {
	messageID := "4711"
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		first, err := pgxlock.ClaimTx(ctx, tx, "order:"+messageID, pgxlock.Retention(30*24*time.Hour))
		if err != nil || !first { // !first: another delivery has created the order
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", messageID)
		return err
	})
	if err != nil {
		log.Print(err) // do not acknowledge the message, so that it is delivered again
	}
}

// A client repeats a request with the same key until it has the answer. Whichever call is the first
// makes the order, and all return its answer.
func ExampleAnswerTx() {
	user, key, request := "alice", "8e03978e-40d5-43e8-bc93-6894a57f9324", []byte(`{"item": "book"}`)
	var answer []byte
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		answer, err = pgxlock.AnswerTx(ctx, tx, "order:"+user+":"+key, request, func() ([]byte, error) {
			var id int64
			err := tx.QueryRow(ctx, "INSERT INTO orders (request) VALUES ($1) RETURNING id", request).Scan(&id)
			return fmt.Append(nil, id), err
		}, pgxlock.NoWait, pgxlock.Retention(24*time.Hour))
		return err
	})
	switch {
	case errors.Is(err, pgxlock.ErrNotAcquired):
		log.Print("the first request is in progress") // HTTP status 409
	case errors.Is(err, pgxlock.ErrOtherRequest):
		log.Print("the key was used for another request") // HTTP status 422
	case err != nil:
		log.Print(err)
	default:
		log.Printf("order %s", answer)
	}
}

func ExampleNewLeaseLocker() {
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: 15 * time.Second, Owner: "billing-7f9c"})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(context.Background())
}

// The program uses a *sql.DB, of lib/pq or of pgx, with or without GORM or sqlx. The pool
// beside it is cheap: it connects only when it is used, and the Locker never takes a
// connection from it.
func ExampleNewLeaseLocker_databaseSQL() {
	db, err := sql.Open("postgres", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	locks, err := pgxlock.NewLeaseLocker(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(context.Background())
}

// Nothing needs to be installed. Other programs can take the same lock with SELECT
// pg_advisory_lock(42).
func ExampleNewAdvisoryLocker() {
	locks, err := pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{TTL: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(context.Background())

	err = locks.Do(ctx, pgxlock.RawKey(42), func(ctx context.Context, lock *pgxlock.Lock) error {
		return buildReport(ctx) // ctx ends when the server ends the session
	})
	if errors.Is(err, pgxlock.ErrUnavailable) {
		log.Print("the server cannot be reached, try again later: ", err)
	}
}

// The program does slow work under the lock, and then writes the result in a short
// transaction. If another process has the lock by then, Fence fails and nothing is written.
func ExampleLock_Fence() {
	err := locks.Do(ctx, "report:daily", func(ctx context.Context, lock *pgxlock.Lock) error {
		if err := buildReport(ctx); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := lock.Fence(ctx, tx); err != nil { // first, before any write
				return err
			}
			_, err := tx.Exec(ctx, "INSERT INTO reports DEFAULT VALUES")
			return err
		})
	})
	if errors.Is(err, pgxlock.ErrLost) {
		log.Print("another process may have built the report meanwhile")
	}
}

func ExampleLock_FenceSQL() {
	err := locks.Do(ctx, "invoice:42", func(ctx context.Context, lock *pgxlock.Lock) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := lock.FenceSQL(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE invoices SET paid = true WHERE id = 42"); err != nil {
			return err
		}
		return tx.Commit()
	})
	if errors.Is(err, pgxlock.ErrLost) {
		log.Print("another process may have paid the invoice meanwhile")
	}
}

// DoTx acquires the lock, begins a transaction, fences it, and commits it after the function
// returns nil.
func ExampleLocker_DoTx() {
	err := locks.DoTx(ctx, pool, "invoice:42", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
		_, err := tx.Exec(ctx, "UPDATE invoices SET paid = true WHERE id = 42")
		return err
	}, pgxlock.MaxWait(10*time.Second), pgxlock.Retries(3))
	if err != nil {
		log.Print("the invoice is not paid: ", err)
	}
}

// Skip the work if another process does it.
func ExampleLocker_TryDo() {
	ran, err := locks.TryDo(ctx, "reports:nightly", func(ctx context.Context, lock *pgxlock.Lock) error {
		return buildReport(ctx)
	})
	if err == nil && !ran {
		log.Print("another process is building the report")
	}
}

// Wait for at most ten seconds, and then work for as long as it takes.
func ExampleLocker_Do() {
	err := locks.Do(ctx, "invoice:42", func(ctx context.Context, lock *pgxlock.Lock) error {
		return buildReport(ctx) // ctx ends if the lock is lost
	}, pgxlock.MaxWait(10*time.Second), pgxlock.TTL(time.Minute))
	if errors.Is(err, pgxlock.ErrNotAcquired) {
		log.Print("still busy after ten seconds")
	}
}

func ExampleLocker_Acquire() {
	lock, err := locks.Acquire(ctx, "cache:warm", pgxlock.MaxWait(time.Second))
	if e, ok := errors.AsType[*pgxlock.Error](err); ok && errors.Is(err, pgxlock.ErrNotAcquired) {
		log.Printf("held by %s for up to %s", e.Holder, e.RetryAfter)
	}
	if err != nil {
		return
	}
	defer lock.Release(ctx)

	work, cancel := lock.Context(ctx)
	defer cancel()
	_ = buildReport(work)
}

// Watch shows who leads now, and every change.
func ExampleLocker_Watch() {
	for leaders, err := range locks.Watch(ctx, "scheduler") {
		switch {
		case err != nil:
			log.Print("the leader is unknown: ", err)
		case len(leaders) == 0:
			log.Print("there is no leader")
		default:
			log.Print("the leader is at ", leaders[0].Metadata)
		}
	}
}

// Observe logs how long calls waited for a busy lock, and each lost lock.
func ExampleEvent() {
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{
		Observe: func(ctx context.Context, e pgxlock.Event) {
			switch {
			case e.Op == pgxlock.EventAcquired && e.Busy:
				slog.InfoContext(ctx, "waited for a lock", "key", e.Key, "wait", e.Wait)
			case e.Op == pgxlock.EventLost:
				slog.ErrorContext(ctx, "lost a lock", "key", e.Key, "held", e.Held, "error", e.Err)
			}
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(context.Background())
}

// A Locker tries again after 50 ms at first, and later after up to 5 s.
func ExampleExponentialBackoff() {
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{
		Backoff: pgxlock.ExponentialBackoff(50*time.Millisecond, 5*time.Second),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(context.Background())
}

func buildReport(ctx context.Context) error { return ctx.Err() }
