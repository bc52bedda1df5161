// Transfer moves money between a few accounts, from many workers at a time, and
// checks the books when they are done.
//
//	go run ./examples/transfer -database-url postgres://localhost/test
//
// It makes a schema transfer_example, anew each time; nothing has to be installed
// in the database. Read transfer.go first.
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// load is what the example does.
type load struct {
	accounts  int
	opening   int64 // what is in each of them
	workers   int
	transfers int           // by each worker
	patience  time.Duration // with a busy account
}

func main() {
	log.SetFlags(0)
	url := flag.String("database-url", "", "connection `string` of a database to try it in")
	l := load{opening: 100, patience: 10 * time.Millisecond}
	flag.IntVar(&l.accounts, "accounts", 4, "how many accounts there are; few are busy ones")
	flag.IntVar(&l.workers, "workers", 8, "how many workers there are")
	flag.IntVar(&l.transfers, "transfers", 100, "how many transfers each worker makes")
	flag.Parse()
	if *url == "" || flag.NArg() > 0 || l.accounts < 2 || l.workers < 1 || l.transfers < 0 {
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, *url, l, log.Printf)
	stop()
	if err != nil {
		log.Fatal("transfer: ", err)
	}
}

func run(ctx context.Context, url string, l load, printf func(string, ...any)) error {
	pool, err := connect(ctx, url, l.workers)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := openAccounts(ctx, pool, l.accounts, l.opening); err != nil {
		return err
	}
	done, err := l.run(ctx, pool)
	if err != nil {
		return err
	}
	printf("%d workers: %d transfers made, %d refused for lack of money, %d postponed because an account was busy",
		l.workers, done.made, done.refused, done.postponed)

	b, err := readBooks(ctx, pool)
	if err != nil {
		return err
	}
	printf("the books: %d in all accounts together, %d in the poorest, %d transfers entered, %d postponed",
		b.total, b.lowest, b.made, b.postponed)
	return l.check(b, done)
}

// connect makes a pool with a connection for each worker: a worker that waits for a
// lock has one meanwhile.
func connect(ctx context.Context, url string, workers int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(workers)
	config.ConnConfig.RuntimeParams["search_path"] = schema
	return pgxpool.NewWithConfig(ctx, config)
}

// tally is what became of transfers.
type tally struct{ made, refused, postponed int }

// run has the workers make their transfers, each between two accounts and of an
// amount that chance decides. It ends early when one of them fails.
func (l load) run(ctx context.Context, pool *pgxpool.Pool) (tally, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu    sync.Mutex
		total tally
		work  sync.WaitGroup
	)
	for range l.workers {
		work.Go(func() {
			for range l.transfers {
				from := rand.N(l.accounts)
				to := (from + 1 + rand.N(l.accounts-1)) % l.accounts // another one
				moved, err := transferOrPostpone(ctx, pool, from, to, 1+rand.N(l.opening), l.patience)
				mu.Lock()
				switch {
				case moved:
					total.made++
				case errors.Is(err, errNotEnough):
					total.refused++
				case err == nil:
					total.postponed++
				default:
					cancel(err)
				}
				mu.Unlock()
				if ctx.Err() != nil {
					return
				}
			}
		})
	}
	work.Wait()
	return total, context.Cause(ctx)
}
