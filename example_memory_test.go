package pgxlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/pgxlock/pgxlock"
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
