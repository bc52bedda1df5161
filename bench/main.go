// Bench measures what pgxlock costs, beside what one would have without it.
//
//	go run -C bench . -run lease -time 2s
//
// It starts a PostgreSQL of its own from the binaries of this machine, with
// fsync and synchronous_commit on, and a Redis and an etcd where a row needs
// them. A machine that others use too makes every absolute figure a matter of
// luck, so the result is the ratio of two ways that took turns in short slices.
//
// Comparisons of two ways are in figures.go, those with servers of others in
// table.go; both are rows (row.go). contest.go is how ways are compared, stage.go
// what they find prepared. What has no peer is counted by a [survey].
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

const stopPatience = 30 * time.Second

// maxCommitDelay is the most that PostgreSQL takes for commit_delay.
const maxCommitDelay = 100 * time.Millisecond

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	pattern := flag.String("run", "", "measure only the rows that match this `regexp`, such as '^lease/floor 32$'")
	span := flag.Duration("time", 3*time.Second, "how long to measure two ways, at least")
	folder := flag.String("write", "", "write pages and a chart of all rows into this `folder`")
	runs := flag.Int("runs", 1, "repeat on a busy machine: at most so many runs, of which the quietest counts")
	delay := flag.Duration("commit-delay", 0, "have the server wait for so long (commit_delay) before it makes a commit durable, as on a slower disk")
	growing := flag.Bool("growth", false, "measure how costs grow instead; -write then writes docs/sizing.md and its charts")
	small := flag.Bool("small", false, "with -growth: a few small sizes, to try it")
	child := flag.String("child", "", "run as one of many processes, with locks of this `kind`")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flag.Arg(0))
	}
	if *child != "" {
		return runChild(context.Background(), *child, os.Stdin, os.Stdout)
	}
	if *runs < 1 {
		return fmt.Errorf("-runs must be at least 1, it is %d", *runs)
	}
	if *folder != "" && *pattern != "" {
		return errors.New("-write is for a run of all rows: leave -run out")
	}
	if *delay != 0 && (*delay < 0 || *delay > maxCommitDelay) {
		return fmt.Errorf("-commit-delay must be at most %s, it is %s", maxCommitDelay, *delay)
	}
	if *folder != "" && *delay > 0 {
		return errors.New("-write is for the disk as it is: leave -commit-delay out")
	}
	wanted, err := regexp.Compile(*pattern)
	if err != nil {
		return err
	}
	rows := rowsMatching(wanted)
	counts := slices.DeleteFunc(slices.Clone(surveys), func(v survey) bool { return !wanted.MatchString(v.name) })
	if len(rows)+len(counts) == 0 {
		return fmt.Errorf("no row matches %q", wanted)
	}
	if *small && (!*growing || *folder != "") {
		return errors.New("-small is to try -growth: its sizes are not for a page")
	}
	if *growing && (*pattern != "" || *delay != 0) {
		return errors.New("-growth is of everything on the disk as it is: leave -run and -commit-delay out")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *growing {
		return measureGrowth(ctx, *small, *folder)
	}
	daemons, err := findDaemons(ctx, rows, counts)
	if err != nil {
		return err
	}
	return withServer(ctx, onDisk, *delay, func(server *pgserver.Server) error {
		sync, err := syncTime(filepath.Dir(server.DataDir()))
		if err != nil {
			return fmt.Errorf("measure fdatasync: %w", err)
		}
		var about []string
		if *folder != "" {
			if about, err = describe(server.Version(), daemons, sync); err != nil {
				return err
			}
		}
		printHeader(server, daemons, sync, *delay)
		begun := time.Now()
		r, did, err := quietest(*runs, func() (report, error) { return measureAll(ctx, server, rows, counts, *span) })
		if err != nil {
			return err
		}
		fmt.Println()
		for _, v := range r.verdicts() {
			fmt.Printf("GOAL %s\n", v)
		}
		fmt.Printf("\n%d rows, %d runs in %s\n", len(rows)+len(counts), did, time.Since(begun).Round(time.Second))
		if *folder == "" {
			return nil
		}
		r.machine, r.runs = about, did
		return r.write(*folder)
	})
}

// findDaemons looks for what the rows and surveys need, and returns it, found or not.
func findDaemons(ctx context.Context, rows []row, counts []survey) ([]*daemon, error) {
	var daemons []*daemon
	need := func(d *daemon) error {
		if d == nil || slices.Contains(daemons, d) {
			return nil
		}
		daemons = append(daemons, d)
		return d.find(ctx)
	}
	for _, r := range rows {
		for _, name := range r.names() {
			if err := need(r.daemons[name]); err != nil {
				return nil, err
			}
		}
	}
	for _, v := range counts {
		for _, d := range v.needs {
			if err := need(d); err != nil {
				return nil, err
			}
		}
	}
	return daemons, nil
}

// onDisk is the server whose costs are measured.
var onDisk = pgserver.Config{TCP: true, OnDisk: true}

// withServer calls fn with a server that is there for nothing else.
func withServer(ctx context.Context, cfg pgserver.Config, delay time.Duration, fn func(*pgserver.Server) error) (err error) {
	if err := forgetSettings(); err != nil {
		return err
	}
	cfg.Settings = map[string]string{
		"fsync":              "on",
		"synchronous_commit": "on",
		"max_connections":    "400", // the widest row has 256 workers
		// A checkpoint in a slice is a cost that the other side does not have.
		"max_wal_size":       "4GB",
		"checkpoint_timeout": "30min",
		"commit_delay":       strconv.FormatInt(delay.Microseconds(), 10),
		"commit_siblings":    "0", // it waits also when no other transaction is open
	}
	server, err := pgserver.Start(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPatience)
		defer cancel()
		err = errors.Join(err, server.Stop(ctx))
	}()
	return fn(server)
}

// forgetSettings takes the variables that psql and etcd read out of the
// environment: pgx would mix PGSERVICE, PGOPTIONS and the like into our
// connections, and etcd has one for each flag. Those of our own are not theirs.
func forgetSettings() error {
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		theirs := strings.HasPrefix(name, "PG") && !strings.HasPrefix(name, "PGXLOCK_") || strings.HasPrefix(name, "ETCD_")
		if !theirs {
			continue
		}
		if err := os.Unsetenv(name); err != nil {
			return err
		}
	}
	return nil
}
