package monitor_test

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

// The examples are compiled and shown, not run: they need a server.
var (
	ctx  = context.Background()
	pool *pgxpool.Pool
)

// A Monitor lists the locks of all programs that use the database.
func ExampleNew() {
	m, err := monitor.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	snapshot, err := m.Snapshot(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, holder := range snapshot.Holders {
		fmt.Println(holder)
	}
	for _, waiter := range snapshot.Waiters {
		fmt.Println(waiter)
	}
}

// An operator takes a lock away from each of its holders. The reason is in the error that the
// holder receives.
func ExampleMonitor_Evict() {
	m, err := monitor.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	holders, err := m.Holders(ctx, monitor.Filter{Kind: pgxlock.KindLease, Key: "report:daily"})
	if err != nil {
		log.Fatal(err)
	}
	for _, holder := range holders {
		evicted, err := m.Evict(ctx, holder, "hangs since the deploy")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(holder.ID, "held the lock until now:", evicted)
	}
}
