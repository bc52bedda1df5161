package pgxlock_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/pgxlock/pgxlock"
)

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
