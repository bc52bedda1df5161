package once_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/once"
)

// Examples without output are compiled and shown, not run: they need a server.
var (
	ctx  = context.Background()
	pool *pgxpool.Pool
)

// The first process that asks makes the report of the day, which is due at 3 in the morning in
// Berlin.
func ExampleNew() {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		log.Fatal(err)
	}
	daily, err := once.New(pool, 24*time.Hour, &once.Config{Offset: 3 * time.Hour, Location: berlin})
	if err != nil {
		log.Fatal(err)
	}
	defer daily.Close(context.Background())
	ran, err := daily.Do(ctx, "report", func(_ context.Context, run once.Run) error {
		fmt.Println("the report of", run.Slot.AddDate(0, 0, -1).Format(time.DateOnly))
		return nil
	})
	if err != nil {
		log.Fatal(err) // if !ran, the report may not have been made
	}
	if !ran {
		fmt.Println("another process is making the report, or has made it")
	}
}

// Every process calls Run, and in each hour one of them does the work. If it fails or dies,
// the work is done again within the hour.
func ExampleRunner_Run() {
	hourly, err := once.New(pool, time.Hour, &once.Config{Retry: true, CatchUp: 3})
	if err != nil {
		log.Fatal(err)
	}
	defer hourly.Close(context.Background())
	err = hourly.Run(ctx, "import", func(ctx context.Context, run once.Run) error {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer tx.Rollback(ctx)
		if err := run.Lock.Fence(ctx, tx); err != nil { // another attempt may be running
			return err
		}
		return tx.Commit(ctx)
	})
	log.Print(err) // ctx has ended
}

// DoAt works for any schedule, because the scheduler passes the time that the call is for.
func ExampleRunner_DoAt() {
	ticks, err := once.New(pool, time.Minute, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer ticks.Close(context.Background())
	firstOfMonth := time.Date(2026, time.December, 1, 0, 0, 0, 0, time.UTC)
	if _, err := ticks.DoAt(ctx, "invoices", firstOfMonth, func(context.Context, once.Run) error { return nil }); err != nil {
		log.Fatal(err)
	}
}

// A unit test needs no server.
func ExampleNewMemory() {
	daily, err := once.NewMemory(24*time.Hour, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer daily.Close(context.Background())
	tick := time.Now().Round(time.Minute) // the time that the scheduler calls for
	for range 2 {
		ran, err := daily.DoAt(ctx, "report", tick, func(context.Context, once.Run) error {
			fmt.Println("it runs")
			return nil
		})
		fmt.Println(ran, err)
	}
	// Output:
	// it runs
	// true <nil>
	// false <nil>
}
