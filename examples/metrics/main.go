// Metrics counts what happens to the locks of a program: how many are held, who waits
// and how long, what is lost. It needs nothing but the standard library's expvar.
//
//	go run ./examples/metrics -database-url postgres://localhost/test -listen localhost:8123
//	curl localhost:8123/debug/vars
//
// It makes a schema metrics_example, anew each time, and installs pgxlock there.
// Read metrics.go first.
package main

import (
	"context"
	"errors"
	"expvar"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/migrations"
)

// schema is the example's own; the pool's search_path is set to it.
const schema = "metrics_example"

// load is what the example does.
type load struct {
	workers int
	rounds  int // of each of them
	keys    int // that they work on; fewer: more of them wait
}

func main() {
	log.SetFlags(0)
	var l load
	url := flag.String("database-url", "", "connection `string` of a database to try it in")
	listen := flag.String("listen", "", "`address` on which /debug/vars shows the metrics meanwhile")
	flag.IntVar(&l.workers, "workers", 8, "how many workers there are")
	flag.IntVar(&l.rounds, "rounds", 100, "how often each of them takes a lock")
	flag.IntVar(&l.keys, "keys", 3, "how many keys they take them on")
	flag.Parse()
	if *url == "" || flag.NArg() > 0 || l.workers < 1 || l.rounds < 1 || l.keys < 1 {
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	m := &metrics{}
	expvar.Publish("pgxlock", m)
	err := serve(*listen)
	if err == nil {
		err = run(ctx, *url, l, m)
	}
	stop()
	fmt.Println(m)
	if err != nil {
		log.Fatal("metrics: ", err)
	}
}

// serve shows all that is published, until the program ends.
func serve(address string) error {
	if address == "" {
		return nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	go func() { log.Print(http.Serve(listener, expvar.Handler())) }()
	return nil
}

func run(ctx context.Context, url string, l load, m *metrics) error {
	pool, err := connect(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Observe: m.observe})
	if err != nil {
		return err
	}
	return errors.Join(work(ctx, locks, l), locks.Close(context.WithoutCancel(ctx)))
}

// work has workers take locks, and do something under them. Now and then one does not
// wait.
func work(ctx context.Context, locks *pgxlock.Locker, l load) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var workers sync.WaitGroup
	for range l.workers {
		workers.Go(func() {
			for range l.rounds {
				key := fmt.Sprint("invoice:", rand.N(l.keys))
				var err error
				if rand.N(4) == 0 {
					_, err = locks.TryDo(ctx, key, something)
				} else {
					err = locks.Do(ctx, key, something)
				}
				if err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	workers.Wait()
	return context.Cause(ctx)
}

// something takes up to 10 ms.
func something(ctx context.Context, _ *pgxlock.Lock) error {
	select {
	case <-time.After(rand.N(10 * time.Millisecond)):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// connect makes a pool, and installs pgxlock in a new schema.
func connect(ctx context.Context, url string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.RuntimeParams["search_path"] = schema
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if _, err = pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE"); err == nil {
		err = migrations.Up(ctx, pool, &migrations.Config{Schema: schema})
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}
