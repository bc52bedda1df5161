package pgxlockprom_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/pgxlock/pgxlock"
	pgxlockprom "github.com/pgxlock/pgxlock/adapters/prometheus"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// A scrape is what a server of Prometheus reads.
type scrape struct {
	text     string
	families map[string]*dto.MetricFamily
}

func read(t *testing.T, registry *prometheus.Registry) scrape {
	t.Helper()
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer server.Close()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := server.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v\n%s", response.Status, err, text)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(text)))
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return scrape{string(text), families}
}

// value returns a counter, a gauge, or the number of observations of a histogram; -1 if
// there is no such metric. labels are names and values.
func (s scrape) value(name string, labels ...string) float64 {
	family, known := s.families[name]
	if !known {
		return -1
	}
metrics:
	for _, m := range family.Metric {
		for i := 0; i < len(labels); i += 2 {
			if !has(m, labels[i], labels[i+1]) {
				continue metrics
			}
		}
		switch family.GetType() {
		case dto.MetricType_COUNTER:
			return m.Counter.GetValue()
		case dto.MetricType_GAUGE:
			return m.Gauge.GetValue()
		case dto.MetricType_HISTOGRAM:
			return float64(m.Histogram.GetSampleCount())
		}
	}
	return -1
}

func has(m *dto.Metric, name, value string) bool {
	for _, pair := range m.Label {
		if pair.GetName() == name && pair.GetValue() == value {
			return true
		}
	}
	return false
}

func (s scrape) wants(t *testing.T, want float64, name string, labels ...string) {
	t.Helper()
	if got := s.value(name, labels...); got != want {
		t.Errorf("%s%v is %v, want %v", name, labels, got, want)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// family is what stands before the colon of a key.
func family(key string) string {
	name, _, _ := strings.Cut(key, ":")
	return name
}

// operate does something of everything that emits events, and leaves one lease held and a
// caller waiting for it until the test is over. The rest of each key is a secret.
func operate(t *testing.T, pool *pgxpool.Pool, m *pgxlockprom.Metrics) {
	t.Helper()
	ctx := t.Context()
	const key = "invoice:secret-17"
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Owner: "secret-owner", Observe: m.Observe, TTL: time.Hour, Renew: 100 * time.Millisecond})
	check(t, err)
	t.Cleanup(func() { _ = locks.Close(context.Background()) })
	lock, err := locks.Acquire(ctx, key)
	check(t, err)
	if _, err := locks.TryAcquire(ctx, key); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatal(err)
	}
	check(t, lock.Renew(ctx))
	check(t, lock.Release(ctx))

	mon, err := monitor.New(pool, &monitor.Config{Observe: m.Observe})
	check(t, err)
	lock, err = locks.Acquire(ctx, "evicted:secret-18")
	check(t, err)
	holders, err := mon.Holders(ctx, monitor.Filter{Kind: pgxlock.KindLease})
	check(t, err)
	_, err = mon.Evict(ctx, holders[0], "for a test")
	check(t, err)
	<-lock.Lost()

	check(t, locks.Lead(ctx, "leader:secret-19", func(context.Context, *pgxlock.Lock) error { return nil }))

	check(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pgxlock.LockTx(ctx, tx, key, pgxlock.Observe(m.Observe)); err != nil {
			return err
		}
		_, err := pgxlock.ClaimTx(ctx, tx, key, pgxlock.Observe(m.Observe))
		return err
	}))
	limiter, err := ratelimit.New(pool, ratelimit.Every(time.Hour), 1, &ratelimit.Config{Observe: m.Observe})
	check(t, err)
	for range 3 {
		_, err := limiter.Allow(ctx, key)
		check(t, err)
	}
	check(t, limiter.Close(ctx))
	runner, err := once.New(pool, 3000*time.Hour, &once.Config{Observe: m.Observe})
	check(t, err)
	for range 2 {
		_, err := runner.Do(ctx, key, func(context.Context, once.Run) error { return nil })
		check(t, err)
	}
	check(t, runner.Close(ctx))

	_, err = locks.Acquire(ctx, "held:secret-20")
	check(t, err)
	others, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Hour, Observe: m.Observe}) // callers of one Locker queue in their process
	check(t, err)
	t.Cleanup(func() { _ = others.Close(context.Background()) })
	waiting, cancel := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = others.Acquire(waiting, "held:secret-20")
	}()
	t.Cleanup(func() {
		cancel()
		<-over
	})
	for waits := 0; waits != 1; {
		waiters, err := mon.Waiters(ctx, monitor.Filter{Kind: pgxlock.KindLease})
		check(t, err)
		waits = len(waiters)
	}
}

func TestCountsAreThoseOfWhatHappened(t *testing.T) {
	t.Parallel()
	pool, registry := testkit.Migrated(t).Pool, prometheus.NewPedanticRegistry()
	m, err := pgxlockprom.New(registry, &pgxlockprom.Config{Group: family})
	check(t, err)
	operate(t, pool, m)
	got := read(t, registry)

	invoice := []string{"group", "invoice", "kind", "lease"}
	of := func(more ...string) []string { return append(invoice[:len(invoice):len(invoice)], more...) }
	got.wants(t, 1, "pgxlock_acquire_wait_seconds", of("result", "ok")...)
	got.wants(t, 1, "pgxlock_acquire_wait_seconds", of("result", "busy")...)
	got.wants(t, 1, "pgxlock_busy_total", invoice...)
	got.wants(t, 0, "pgxlock_waiting", invoice...)
	got.wants(t, 0, "pgxlock_held", invoice...)
	got.wants(t, 1, "pgxlock_hold_seconds", invoice...)
	got.wants(t, 1, "pgxlock_releases_total", of("result", "ok")...)
	if n := got.value("pgxlock_renewals_total", of("result", "ok")...); n < 0 {
		t.Errorf("%v renewals", n)
	}
	if got.value("pgxlock_renewal_interval_seconds", invoice...) < 1 {
		t.Error("no interval of a renewal")
	}
	got.wants(t, 1, "pgxlock_lost_total", "group", "evicted", "kind", "lease", "reason", "evicted")
	got.wants(t, 0, "pgxlock_lost_total", of("reason", "lost")...) // an alert sees the first loss only as an increase from 0
	got.wants(t, 1, "pgxlock_evictions_total", "kind", "lease", "result", "ok")
	got.wants(t, 0, "pgxlock_leading", "group", "leader", "kind", "lease")
	got.wants(t, 1, "pgxlock_tx_lock_wait_seconds", "group", "invoice", "result", "ok")
	got.wants(t, 1, "pgxlock_claims_total", "group", "invoice", "result", "ok")
	got.wants(t, 1, "pgxlock_limit_wait_seconds", "group", "invoice", "result", "ok")
	got.wants(t, 2, "pgxlock_limit_wait_seconds", "group", "invoice", "result", "limited")
	got.wants(t, 1, "pgxlock_runs_total", "group", "invoice", "result", "ok")
	got.wants(t, 1, "pgxlock_runs_total", "group", "invoice", "result", "skipped")
	got.wants(t, 1, "pgxlock_run_seconds", "group", "invoice", "result", "ok")
	got.wants(t, 1, "pgxlock_held", "group", "held", "kind", "lease")
	got.wants(t, 1, "pgxlock_waiting", "group", "held", "kind", "lease")
	if strings.Contains(got.text, "secret") {
		t.Errorf("a key or an owner is shown:\n%s", got.text)
	}
}

func TestCollectorShowsTheLocksOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	pool, registry := db.Pool, prometheus.NewPedanticRegistry()
	m, err := pgxlockprom.New(prometheus.NewRegistry(), nil)
	check(t, err)
	operate(t, pool, m)
	if _, err := pool.Exec(t.Context(), `select acquire_lock('secret-expired', 'secret-holder', 3600);
		update distributed_locks set expires_at = now() - interval '1 minute' where lock_name = 'secret-expired'`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	conn, err := pool.Acquire(t.Context())
	check(t, err)
	defer conn.Release()
	if _, err := conn.Exec(t.Context(), "select pg_advisory_lock_shared(17)"); err != nil {
		t.Fatal(err)
	}
	collector, err := pgxlockprom.NewCollector(pool, &pgxlockprom.CollectorConfig{Doctor: true, Timeout: pgtest.Patience})
	check(t, err)
	check(t, registry.Register(collector))
	got := read(t, registry)
	got.wants(t, 1, "pgxlock_collector_up")
	got.wants(t, 0, "pgxlock_collector_unreadable")
	got.wants(t, 1, "pgxlock_holders", "kind", "lease", "mode", "exclusive")
	got.wants(t, 0, "pgxlock_holders", "kind", "lease", "mode", "shared")
	got.wants(t, 1, "pgxlock_holders", "kind", "advisory", "mode", "shared")
	got.wants(t, 1, "pgxlock_waiters", "kind", "lease")
	got.wants(t, 0, "pgxlock_waiters", "kind", "advisory")
	got.wants(t, 1, "pgxlock_expired_leases", "state", "expired")
	got.wants(t, 0, "pgxlock_expired_leases", "state", "abandoned")
	got.wants(t, 1, "pgxlock_expired_leases", "state", "evicted")
	got.wants(t, 0, "pgxlock_suspect_leases")
	got.wants(t, 0, "pgxlock_check_status", "check", "tokens")
	for _, name := range []string{"pgxlock_lock_table_entries", "pgxlock_lock_table_capacity", "pgxlock_oldest_hold_seconds", "pgxlock_tokens_used_ratio", "pgxlock_collector_duration_seconds"} {
		if got.value(name) <= 0 {
			t.Errorf("%s is %v", name, got.value(name))
		}
	}
	if got.value("pgxlock_oldest_wait_seconds", "kind", "lease") <= 0 {
		t.Error("the wait has no duration")
	}
	if strings.Contains(got.text, "secret") {
		t.Errorf("a key or an owner is shown:\n%s", got.text)
	}

	reader := prometheus.NewPedanticRegistry()
	collector, err = pgxlockprom.NewCollector(pgtest.Pool(t, db.URL+"&options=-c%20role%3Dpg_monitor"), &pgxlockprom.CollectorConfig{Doctor: true, Timeout: pgtest.Patience})
	check(t, err)
	check(t, reader.Register(collector))
	got = read(t, reader)
	got.wants(t, 2, "pgxlock_check_status", "check", "rights")
	got.wants(t, -1, "pgxlock_check_status", "check", "tokens") // it may not know
}

// Old figures would look like new ones.
func TestCollectorShowsLateLeasesAndOfAServerThatIsGoneOnlyThat(t *testing.T) {
	t.Parallel()
	db, registry := testkit.Migrated(t), prometheus.NewPedanticRegistry()
	pool := db.Pool
	expires := func(in string) {
		t.Helper()
		db.Exec(t, "update distributed_locks set expires_at = clock_timestamp() + interval '"+in+"'")
	}
	db.Exec(t, "select acquire_lock('k', 'h', 3600)")
	collector, err := pgxlockprom.NewCollector(pool, &pgxlockprom.CollectorConfig{Every: time.Nanosecond, Timeout: pgtest.Patience})
	check(t, err)
	check(t, registry.Register(collector))
	got := read(t, registry)
	got.wants(t, 1, "pgxlock_collector_up")
	expires("2 hours")
	read(t, registry).wants(t, 0, "pgxlock_late_leases") // it was renewed
	expires("4 seconds")
	read(t, registry).wants(t, 0, "pgxlock_late_leases") // its TTL is a shorter one now
	pgtest.Until(t, "it is late", func() bool {
		db.Exec(t, "update distributed_locks set expires_at = clock_timestamp() + interval '4 seconds' where expires_at < clock_timestamp() + interval '1 second'")
		return read(t, registry).value("pgxlock_late_leases") == 1
	})
	pool.Close()
	got = read(t, registry)
	got.wants(t, 0, "pgxlock_collector_up")
	got.wants(t, -1, "pgxlock_holders")
}

func TestGroupsAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	m, err := pgxlockprom.New(registry, &pgxlockprom.Config{Group: func(key string) string { return key }, MaxGroups: 3})
	check(t, err)
	for i := range 50 {
		m.Observe(t.Context(), pgxlock.Event{Op: pgxlock.EventBusy, Kind: pgxlock.KindLease, Key: fmt.Sprint(i)})
	}
	got := read(t, registry)
	if n := len(got.families["pgxlock_busy_total"].Metric); n != 4 {
		t.Errorf("%d series, want 3 and one for all others", n)
	}
	got.wants(t, 47, "pgxlock_busy_total", "group", "other")
}

func TestLateRenewalIsCountedApart(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	m, err := pgxlockprom.New(registry, nil)
	check(t, err)
	for _, since := range []time.Duration{9 * time.Second, 16 * time.Second} {
		m.Observe(t.Context(), pgxlock.Event{Op: pgxlock.EventRenewed, Kind: pgxlock.KindLease, TTL: 30 * time.Second, SinceRenewal: since})
	}
	got := read(t, registry)
	got.wants(t, 1, "pgxlock_renewals_total", "result", "ok")
	got.wants(t, 1, "pgxlock_renewals_total", "result", "late")
}

func TestSecondRegistrationIsRefusedAndUndone(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	taken := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "pgxlock_leading", Help: "Terms of this process as leader."}, []string{"group", "kind"})
	check(t, registry.Register(taken))
	if _, err := pgxlockprom.New(registry, nil); err == nil {
		t.Fatal("a name that is taken is registered")
	}
	registry.Unregister(taken)
	if _, err := pgxlockprom.New(registry, nil); err != nil {
		t.Errorf("the first attempt left something: %v", err)
	}
	if _, err := pgxlockprom.New(nil, nil); err == nil {
		t.Error("there is no registerer")
	}
}
