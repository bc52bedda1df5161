package serve_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sys/unix"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// processTime is the processor time that a process has used; 0: this one.
func processTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	clock := int32(unix.CLOCK_PROCESS_CPUTIME_ID)
	if pid != 0 {
		clock = int32(^pid)<<3 | 2 // as clock_getcpuclockid(3)
	}
	var used unix.Timespec
	if err := unix.ClockGettime(clock, &used); err != nil {
		t.Fatal(err)
	}
	return time.Duration(used.Nano())
}

// Not parallel, because it measures its own process. Each look is the first of a new server, so
// that it reads a snapshot.
func TestPageCostsAtMostFiveTimesAnEmptyOne(t *testing.T) {
	pgtest.Long(t)
	server := pgtest.Private(t, pgserver.Config{})
	pool := pgtest.Pool(t, server.URL("postgres"), func(cfg *pgxpool.Config) { cfg.MaxConns = 1 })
	if err := migrations.Up(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	words := make([]string, 40)
	for i := range words {
		words[i] = fmt.Sprint(i)
	}
	paths := []string{"/", "/?q=order", "/?q=" + url.QueryEscape(strings.Join(words, " "))}
	cost := func(path string) time.Duration {
		var all []time.Duration
		for range 9 {
			page := served(t, pool, nil).Config.Handler
			var pid int
			if err := pool.QueryRow(t.Context(), "select pg_backend_pid()").Scan(&pid); err != nil {
				t.Fatal(err)
			}
			before := processTime(t, 0) + processTime(t, pid)
			got := httptest.NewRecorder()
			page.ServeHTTP(got, httptest.NewRequest(http.MethodGet, "http://localhost"+path, nil))
			all = append(all, processTime(t, 0)+processTime(t, pid)-before)
			if got.Code != http.StatusOK || strings.Contains(got.Body.String(), `id="cannot"`) {
				t.Fatalf("%s: code %d: %s", path, got.Code, got.Body)
			}
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	most := 5 * cost("/")
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		most *= 2 // the race detector makes the command's part several times as expensive, and the server's not
	}
	for _, n := range []int{1_000, 100_000} {
		if _, err := pool.Exec(t.Context(), `insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
			select 'order:' || i, 'pod-' || i % 50, now(), now() + interval '10 hours', '"a step of the order"', i from generate_series(1, $1::int) i
			on conflict do nothing`, n); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), "vacuum analyze distributed_locks"); err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			took := cost(path)
			t.Logf("%d leases, %.20s: %s of processor time; at most %s", n, path, took, most)
			if took > most {
				t.Errorf("%d leases, %.20s: a look takes %s of processor time; want at most %s", n, path, took, most)
			}
		}
	}
}
