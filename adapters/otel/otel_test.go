package pgxlockotel_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgxlock/pgxlock"
	pgxlockotel "github.com/pgxlock/pgxlock/adapters/otel"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// telemetry is what an exporter in memory sees.
type telemetry struct {
	*pgxlockotel.Telemetry
	tracers *trace.TracerProvider
	spans   *tracetest.InMemoryExporter
	reader  *metric.ManualReader
}

func newTelemetry(t *testing.T, cfg pgxlockotel.Config) *telemetry {
	t.Helper()
	seen := &telemetry{spans: tracetest.NewInMemoryExporter(), reader: metric.NewManualReader()}
	seen.tracers = trace.NewTracerProvider(trace.WithSyncer(seen.spans))
	cfg.Tracers, cfg.Meters = seen.tracers, metric.NewMeterProvider(metric.WithReader(seen.reader))
	var err error
	seen.Telemetry, err = pgxlockotel.New(&cfg)
	check(t, err)
	return seen
}

// value returns a counter, or the number of observations of a histogram, over all
// attributes that include those given as name=value; and how many series those are.
func (s *telemetry) value(t *testing.T, name string, attributes ...string) (sum int64, series int) {
	t.Helper()
	var all metricdata.ResourceMetrics
	check(t, s.reader.Collect(context.Background(), &all))
	add := func(set attribute.Set, n int64) {
		text := set.Encoded(attribute.DefaultEncoder()) + ","
		for _, want := range attributes {
			if !strings.Contains(text, want+",") {
				return
			}
		}
		sum, series = sum+n, series+1
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if strings.Contains(fmt.Sprintf("%+v", m), "secret") {
				t.Errorf("%s shows a key", m.Name)
			}
			if m.Name != name {
				continue
			}
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, p.Value)
				}
			case metricdata.Histogram[float64]:
				if m.Unit != "s" {
					t.Errorf("the unit of %s is %q", name, m.Unit)
				}
				for _, p := range data.DataPoints {
					add(p.Attributes, int64(p.Count))
				}
			}
		}
	}
	return sum, series
}

func (s *telemetry) wants(t *testing.T, want int64, name string, attributes ...string) {
	t.Helper()
	if got, _ := s.value(t, name, attributes...); got != want {
		t.Errorf("%s%v is %d, want %d", name, attributes, got, want)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func family(key string) string {
	name, _, _ := strings.Cut(key, ":")
	return name
}

func TestMetricsCountWhatHappened(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), testkit.Migrated(t).Pool
	seen := newTelemetry(t, pgxlockotel.Config{Group: family})
	const key = "counted:secret"
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Hour, Observe: seen.Observe})
	check(t, err)
	lock, err := locks.Acquire(ctx, key)
	check(t, err)
	if _, err := locks.TryAcquire(ctx, key); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatal(err)
	}
	seen.wants(t, 1, "pgxlock.held", "pgxlock.group=counted", "pgxlock.kind=lease")
	if sum, series := seen.value(t, "pgxlock.lost", "pgxlock.group=counted"); sum != 0 || series != 2 { // an alert sees the first loss only as an increase from 0
		t.Errorf("%d lost locks in %d series, want 0 in 2", sum, series)
	}
	check(t, lock.Release(ctx))
	check(t, locks.Lead(ctx, key, func(context.Context, *pgxlock.Lock) error { return nil }))
	check(t, locks.Close(ctx))
	limiter, err := ratelimit.New(pool, ratelimit.Every(time.Hour), 1, &ratelimit.Config{Observe: seen.Observe})
	check(t, err)
	for range 2 {
		_, err = limiter.Allow(ctx, key)
		check(t, err)
	}
	check(t, limiter.Close(ctx))
	runner, err := once.New(pool, 3000*time.Hour, &once.Config{Observe: seen.Observe})
	check(t, err)
	for range 2 {
		_, err = runner.Do(ctx, key, func(context.Context, once.Run) error { return nil })
		check(t, err)
	}
	check(t, runner.Close(ctx))
	tx, err := pool.Begin(ctx)
	check(t, err)
	check(t, pgxlock.LockTx(ctx, tx, key, pgxlock.Observe(seen.Observe)))
	_, err = pgxlock.ClaimTx(ctx, tx, key, pgxlock.Observe(seen.Observe))
	check(t, err)
	check(t, tx.Commit(ctx))

	seen.wants(t, 0, "pgxlock.held")
	seen.wants(t, 0, "pgxlock.waiting")
	seen.wants(t, 1, "pgxlock.busy")
	seen.wants(t, 2, "pgxlock.acquire.wait", "pgxlock.result=ok")
	seen.wants(t, 1, "pgxlock.acquire.wait", "pgxlock.result=busy")
	seen.wants(t, 2, "pgxlock.hold")
	seen.wants(t, 2, "pgxlock.releases", "pgxlock.result=ok")
	seen.wants(t, 0, "pgxlock.leading")
	seen.wants(t, 1, "pgxlock.limit.wait", "pgxlock.result=ok")
	seen.wants(t, 1, "pgxlock.limit.wait", "pgxlock.result=limited")
	seen.wants(t, 1, "pgxlock.runs", "pgxlock.result=ok")
	seen.wants(t, 1, "pgxlock.runs", "pgxlock.result=skipped")
	seen.wants(t, 1, "pgxlock.run", "pgxlock.result=ok")
	seen.wants(t, 1, "pgxlock.tx_lock.wait")
	seen.wants(t, 1, "pgxlock.claims", "pgxlock.group=counted", "pgxlock.result=ok")
}

func TestSpansAreChildrenOfTheCallers(t *testing.T) {
	t.Parallel()
	pool := testkit.Migrated(t).Pool
	for _, keys := range []bool{false, true} {
		t.Run(fmt.Sprint("keys ", keys), func(t *testing.T) {
			t.Parallel()
			seen := newTelemetry(t, pgxlockotel.Config{Keys: keys})
			locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Hour, Observe: seen.Observe})
			check(t, err)
			ctx, parent := seen.tracers.Tracer("test").Start(t.Context(), "request")
			key := fmt.Sprint("spans:secret ", keys)
			lock, err := locks.Acquire(ctx, key)
			check(t, err)
			_, err = pool.Exec(ctx, "delete from distributed_locks where lock_name = $1", key)
			check(t, err)
			if err := lock.Renew(ctx); !errors.Is(err, pgxlock.ErrLost) {
				t.Fatal(err)
			}
			check(t, locks.Close(ctx))
			parent.End()

			spans := make(map[string]tracetest.SpanStub)
			for _, span := range seen.spans.GetSpans() {
				spans[span.Name] = span
				if shown := strings.Contains(fmt.Sprintf("%+v", span), "secret"); shown != keys && span.Name != "request" {
					t.Errorf("%s shows the key: %t", span.Name, shown)
				}
			}
			acquire, hold := spans["pgxlock.acquire"], spans["pgxlock.hold"]
			for name, span := range map[string]tracetest.SpanStub{"pgxlock.acquire": acquire, "pgxlock.hold": hold} {
				if span.Parent.SpanID() != parent.SpanContext().SpanID() || !span.EndTime.After(span.StartTime) {
					t.Errorf("%s is a child of %v, from %v to %v", name, span.Parent.SpanID(), span.StartTime, span.EndTime)
				}
			}
			if acquire.Status.Code != codes.Unset || hold.Status.Code != codes.Error {
				t.Errorf("status of the call %v, of the lost lock %v", acquire.Status, hold.Status)
			}
		})
	}
}

func TestSpanOfARefusalThatCallersExpectIsNoError(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]codes.Code{
		pgxlock.ErrNotAcquired: codes.Unset, pgxlock.ErrOtherRequest: codes.Unset, pgxlock.ErrReadOnly: codes.Error,
	} {
		seen := newTelemetry(t, pgxlockotel.Config{})
		seen.Observe(t.Context(), pgxlock.Event{Op: pgxlock.EventClaim, Key: "k", Err: err})
		if spans := seen.spans.GetSpans(); len(spans) != 1 || spans[0].Status.Code != want {
			t.Errorf("%v: %+v, want one span with status %v", err, spans, want)
		}
	}
}

func TestAttributesAreBounded(t *testing.T) {
	t.Parallel()
	seen := newTelemetry(t, pgxlockotel.Config{Group: func(key string) string { return key }, MaxGroups: 3})
	for i := range 50 {
		seen.Observe(t.Context(), pgxlock.Event{Op: pgxlock.EventBusy, Kind: pgxlock.KindLease, Key: fmt.Sprint(i)})
	}
	if sum, series := seen.value(t, "pgxlock.busy"); sum != 50 || series != 4 {
		t.Errorf("%d calls in %d series, want 50 in 3 and one for all others", sum, series)
	}
	seen.wants(t, 47, "pgxlock.busy", "pgxlock.group=other")
}
