// Orders ships orders that a message bus delivers several times, to several
// workers at a time, some of which crash: each order is shipped once.
//
//	go run ./examples/orders -database-url postgres://localhost/test
//
// It makes a schema orders_example, anew each time, and installs pgxlock there.
// Read ship.go first.
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/migrations"
)

// schema is the example's own; the pool's search_path is set to it.
const schema = "orders_example"

//go:embed tables.sql
var tables string

// load is what the example does.
type load struct {
	orders  int
	copies  int // how often the bus delivers each of them, besides what is not acknowledged
	workers int
}

func main() {
	log.SetFlags(0)
	var l load
	url := flag.String("database-url", "", "connection `string` of a database to try it in")
	flag.IntVar(&l.orders, "orders", 100, "how many orders there are")
	flag.IntVar(&l.copies, "copies", 3, "how often each of them is delivered")
	flag.IntVar(&l.workers, "workers", 8, "how many workers there are")
	flag.Parse()
	if *url == "" || flag.NArg() > 0 || l.orders < 1 || l.copies < 1 || l.workers < 1 {
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, *url, l, log.Printf)
	stop()
	if err != nil {
		log.Fatal("orders: ", err)
	}
}

func run(ctx context.Context, url string, l load, printf func(string, ...any)) error {
	pool, err := connect(ctx, url, l.workers)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := install(ctx, pool); err != nil {
		return err
	}

	done, err := work(ctx, pool, newBus(l.orders, l.copies), l.workers, oneInFour)
	if err != nil {
		return err
	}
	printf("%d workers: %d shipped, %d deliveries of orders that were shipped, %d skipped because another worker was on it, %d crashes",
		l.workers, done.shipped, done.done, done.skipped, done.crashed)

	locks, err := pgxlock.NewLeaseLocker(pool, nil)
	if err != nil {
		return err
	}
	defer locks.Close(context.WithoutCancel(ctx))
	settled, err := settle(ctx, locks, pool)
	if err != nil {
		return err
	}
	forgotten, err := forget(ctx, pool)
	if err != nil {
		return err
	}
	printf("%d shipments settled, %d claims older than %s", settled, forgotten, redelivered)
	return check(ctx, pool, l.orders, printf)
}

// oneInFour is a mishap that befalls one attempt in four, when it has shipped but
// not committed.
func oneInFour(pgx.Tx, int) error {
	if rand.N(4) == 0 {
		return errCrashed
	}
	return nil
}

// connect makes a pool with a connection for each worker.
func connect(ctx context.Context, url string, workers int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(workers)
	config.ConnConfig.RuntimeParams["search_path"] = schema
	return pgxpool.NewWithConfig(ctx, config)
}

// install makes new tables, and installs pgxlock beside them.
func install(ctx context.Context, pool *pgxpool.Pool) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE; CREATE SCHEMA "+schema+"; "+tables)
		return err
	})
	if err != nil {
		return err
	}
	return migrations.Up(ctx, pool, &migrations.Config{Schema: schema})
}

// check fails unless each order was shipped once.
func check(ctx context.Context, pool *pgxpool.Pool, orders int, printf func(string, ...any)) error {
	var once, often int
	err := pool.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE shipments = 1), count(*) FILTER (WHERE shipments > 1)
		  FROM (SELECT count(*) AS shipments FROM shipments GROUP BY order_id) o`).Scan(&once, &often)
	if err != nil {
		return err
	}
	printf("of %d orders %d were shipped once, %d more often, %d not at all", orders, once, often, orders-once-often)
	if once != orders {
		return fmt.Errorf("%d orders were not shipped once", orders-once)
	}
	return nil
}
