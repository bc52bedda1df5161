package systemtest_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// throttle holds a server to the processor's time for about 40 connections a second, whatever one
// costs this machine: by a control group where the test may make one, otherwise it stops the server's
// processes in turns.
func throttle(t *testing.T, server *pgserver.Server) {
	t.Helper()
	const period = 100 * time.Millisecond
	const connections = 40 // a second
	runs := min(time.Duration(timeToConnect(t, server).Seconds()*connections*float64(period)), period*9/10)
	t.Logf("the server runs for %s of %s", runs, period)
	const group = "/sys/fs/cgroup/cpu"
	name := filepath.Join(group, fmt.Sprint("pgxlock-test-", os.Getpid()))
	if err := os.Mkdir(name, 0o755); err == nil {
		t.Cleanup(func() {
			move(t, filepath.Join(group, "cgroup.procs"), name)
			if err := os.Remove(name); err != nil {
				t.Error(err)
			}
		})
		limit := os.WriteFile(filepath.Join(name, "cpu.cfs_quota_us"), []byte(strconv.FormatInt(runs.Microseconds(), 10)), 0o600) // of 100,000
		if limit == nil && os.WriteFile(filepath.Join(name, "cgroup.procs"), []byte(strconv.Itoa(server.PID())), 0o600) == nil {
			return // the processes to come are in it, too
		}
	}
	over, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(over); <-ended })
	go func() {
		defer close(ended)
		for {
			if err := server.Freeze(); err != nil {
				return
			}
			time.Sleep(period - runs)
			if err := server.Thaw(); err != nil {
				return
			}
			select {
			case <-over:
				return
			case <-time.After(runs):
			}
		}
	}()
}

// timeToConnect returns how long a connection to the server takes.
func timeToConnect(t *testing.T, server *pgserver.Server) time.Duration {
	t.Helper()
	var took []time.Duration
	for range 15 {
		began := time.Now()
		conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(began))
		_ = conn.Close(t.Context())
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// move moves the processes of a control group to another one.
func move(t *testing.T, procs, from string) {
	t.Helper()
	pids, err := os.ReadFile(filepath.Join(from, "cgroup.procs"))
	if err != nil {
		t.Error(err)
	}
	for pid := range strings.FieldsSeq(string(pids)) {
		_ = os.WriteFile(procs, []byte(pid), 0o600) // it may have ended
	}
}

// An overloaded server must get well: an attempt that is given up leaves it one more process to
// start, which nobody waits for.
func TestManyProgramsThatStartAtOnceOverloadNoServer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const programs, calls = 64, 3
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_connections": "400", "log_connections": "on"}})
	admin := pgtest.Pool(t, server.URL("postgres"))
	if err := migrations.Up(t.Context(), admin, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Exec(t.Context(), "create database plain"); err != nil {
		t.Fatal(err)
	}
	var locks []*pgxlock.Locker
	needed := 0
	for i := range programs {
		at := func(database string) *pgtest.DB {
			return &pgtest.DB{Pool: pgtest.Pool(t, server.URL(database), func(c *pgxpool.Config) { c.ConnConfig.ConnectTimeout = time.Hour })}
		}
		if i%2 == 0 {
			locks, needed = append(locks, testkit.NewLocker(t, at("postgres"), &pgxlock.LeaseConfig{TTL: time.Hour})), needed+2
		} else {
			locks, needed = append(locks, testkit.NewAdvisory(t, at("plain"), nil)), needed+1
		}
	}
	throttle(t, server)
	before := server.Connections()
	var acquiring sync.WaitGroup
	for i, l := range locks {
		for call := range calls {
			acquiring.Go(func() {
				if err := l.Do(t.Context(), fmt.Sprint(i, ":", call), func(context.Context, *pgxlock.Lock) error { return nil }); err != nil {
					t.Errorf("program %d: %v", i, err)
				}
			})
		}
	}
	acquiring.Wait()
	n := server.Connections() - before
	t.Logf("%d connections were received, %d are needed", n, needed)
	if n < programs/2 || n > needed*12/10 { // a second connection for renewals may still be on its way
		t.Errorf("%d connections were received, %d are needed", n, needed)
	}
}
