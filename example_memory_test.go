package pgxlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/pgxlock/pgxlock"
)

// This process and others lead in turn, until it is told to end. Locks in memory show
// it without a server.
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

// Who wants to know who leads sees it now, and whenever it changes.
func ExampleLocker_Watch() {
	for leaders, err := range locks.Watch(ctx, "scheduler") {
		switch {
		case err != nil:
			log.Print("the leader is not known: ", err)
		case len(leaders) == 0:
			log.Print("nobody leads")
		default:
			log.Print("the leader is at ", leaders[0].Metadata)
		}
	}
}

// Two exports at a time, over all processes.
func ExampleLocker_Semaphore() {
	locks := pgxlock.NewMemoryLocker() // or NewLeaseLocker
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

// Readers have the lock together, and keep writers out. With [pgxlock.NewLeaseLocker] they
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
