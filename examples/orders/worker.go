package main

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// errCrashed is what a worker dies of.
var errCrashed = errors.New("crashed")

// A worker ships what the bus delivers. Now and then it crashes in the middle,
// which is what mishap decides.
type worker struct {
	number int
	mishap func(tx pgx.Tx, order int) error
}

// tally is what became of deliveries.
type tally struct {
	shipped int // by the first worker whose transaction committed
	done    int // there was nothing to do: the order was shipped
	skipped int // another worker was on it: delivered again
	crashed int // the worker was: delivered again
}

// run takes deliveries until there are none.
func (w worker) run(ctx context.Context, pool *pgxpool.Pool, b *bus) (t tally, err error) {
	for {
		select {
		case <-ctx.Done():
			return t, context.Cause(ctx)
		case order, more := <-b.orders:
			if !more {
				return t, nil
			}
			first, err := w.ship(ctx, pool, order)
			switch {
			case errors.Is(err, pgxlock.ErrNotAcquired):
				t.skipped++
				b.nack(order)
			case errors.Is(err, errCrashed):
				t.crashed++
				b.nack(order)
			case err != nil:
				return t, err
			case first:
				t.shipped++
				b.ack()
			default:
				t.done++
				b.ack()
			}
		}
	}
}

// work has n workers take deliveries until there are none, or one of them fails.
func work(ctx context.Context, pool *pgxpool.Pool, b *bus, n int, mishap func(pgx.Tx, int) error) (tally, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu      sync.Mutex
		total   tally
		workers sync.WaitGroup
	)
	for number := range n {
		workers.Go(func() {
			t, err := worker{number, mishap}.run(ctx, pool, b)
			if err != nil {
				cancel(err)
			}
			mu.Lock()
			defer mu.Unlock()
			total.shipped += t.shipped
			total.done += t.done
			total.skipped += t.skipped
			total.crashed += t.crashed
		})
	}
	workers.Wait()
	return total, context.Cause(ctx)
}
