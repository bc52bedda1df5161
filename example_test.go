package pgxlock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// Examples without output are compiled and shown, not run: they need a server.
var (
	ctx   = context.Background()
	pool  *pgxpool.Pool
	db    *sql.DB
	locks *pgxlock.Locker
)

func ExampleNewLeaseLocker() {
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: 15 * time.Second, Owner: "billing-7f9c"})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(context.Background())
}

// Beside a *sql.DB, of lib/pq or of pgx, with GORM or sqlx on it. The pool is cheap:
// it connects only when it is used, and the Locker never takes a connection from it.
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
		log.Print("somebody else may have done it meanwhile")
	}
}

// Skip if another node is on it.
func ExampleLocker_TryDo() {
	ran, err := locks.TryDo(ctx, "reports:nightly", func(ctx context.Context, lock *pgxlock.Lock) error {
		return buildReport(ctx)
	})
	if err == nil && !ran {
		log.Print("another node is building the report")
	}
}

// Wait for at most ten seconds, work for as long as it takes, and write what a
// late holder could not.
func ExampleLocker_Do() {
	err := locks.Do(ctx, "invoice:42", func(ctx context.Context, lock *pgxlock.Lock) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := lock.Fence(ctx, tx); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "UPDATE invoices SET paid = true WHERE id = 42")
			return err
		})
	}, pgxlock.MaxWait(10*time.Second), pgxlock.TTL(time.Minute))
	if errors.Is(err, pgxlock.ErrLost) {
		log.Print("somebody else may have done it meanwhile")
	}
}

func ExampleLocker_Acquire() {
	lock, err := locks.Acquire(ctx, "cache:warm", pgxlock.MaxWait(time.Second))
	if e, ok := errors.AsType[*pgxlock.Error](err); ok && errors.Is(err, pgxlock.ErrNotAcquired) {
		log.Printf("%s has it for up to %s", e.Holder, e.RetryAfter)
	}
	if err != nil {
		return
	}
	defer lock.Release(ctx)

	work, cancel := lock.Context(ctx)
	defer cancel()
	_ = buildReport(work)
}

// The same number as SELECT advisory_lock_key('invoice:42').
func ExampleAdvisoryID() {
	fmt.Println(pgxlock.AdvisoryID("invoice:42"))
	// Output: 6688477336110245193
}

func buildReport(ctx context.Context) error { return ctx.Err() }
