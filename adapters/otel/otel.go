// Package pgxlockotel makes spans and metrics for OpenTelemetry of what locks do.
//
//	telemetry, err := pgxlockotel.New(nil)
//	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Observe: telemetry.Observe})
//
// Each call for a lock is a span pgxlock.acquire, and the time for which a lock is held a
// span pgxlock.hold; both are children of the span in the context of the call. Names and
// units of the metrics are in docs/metrics.md. No attribute has a key as its value unless
// [Config.Group] makes one of it, or Config.Keys asks for it in spans.
package pgxlockotel

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/observe"
)

// scope is the name of the instrumentation.
const scope = "github.com/pgxlock/pgxlock/adapters/otel"

// Config configures [New]. A nil *Config means the defaults.
type Config struct {
	// Meters and Tracers make the instruments and spans. Default: those of package otel.
	Meters  metric.MeterProvider
	Tracers trace.TracerProvider

	// Group returns the value of the attribute pgxlock.group for a key: invoice for
	// invoice:17. It is called in Observe, so it must be quick and safe for concurrent use.
	// Default: all keys are in one group, whose name is empty.
	Group func(key string) string

	// MaxGroups is how many values pgxlock.group has at most; keys of further groups are
	// counted as "other". Default: 100.
	MaxGroups int

	// Keys puts keys and holders into spans, as pgxlock.key and pgxlock.holder. Metrics
	// never have them.
	Keys bool
}

// Telemetry makes spans and metrics of the events of the Lockers, Limiters, Runners and
// Monitors of a process whose Observe is [Telemetry.Observe]. It is safe for concurrent use.
type Telemetry struct {
	groups *observe.Groups
	keys   bool
	tracer trace.Tracer

	wait, hold, renewal, txWait, limitWait, run             metric.Float64Histogram
	busy, renewals, lost, releases, claims, runs, evictions metric.Int64Counter
	held, waiting, leading                                  metric.Int64UpDownCounter
}

// New makes the instruments.
func New(cfg *Config) (*Telemetry, error) {
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if c.Meters == nil {
		c.Meters = otel.GetMeterProvider()
	}
	if c.Tracers == nil {
		c.Tracers = otel.GetTracerProvider()
	}
	t := &Telemetry{groups: observe.NewGroups(c.Group, c.MaxGroups), keys: c.Keys, tracer: c.Tracers.Tracer(scope)}
	meter := c.Meters.Meter(scope)
	var failed error
	histogram := func(name, help string) metric.Float64Histogram {
		h, err := meter.Float64Histogram("pgxlock."+name, metric.WithUnit("s"), metric.WithDescription(help), metric.WithExplicitBucketBoundaries(observe.Seconds...))
		failed = errors.Join(failed, err)
		return h
	}
	counter := func(name, unit, help string) metric.Int64Counter {
		n, err := meter.Int64Counter("pgxlock."+name, metric.WithUnit(unit), metric.WithDescription(help))
		failed = errors.Join(failed, err)
		return n
	}
	gauge := func(name, unit, help string) metric.Int64UpDownCounter {
		n, err := meter.Int64UpDownCounter("pgxlock."+name, metric.WithUnit(unit), metric.WithDescription(help))
		failed = errors.Join(failed, err)
		return n
	}
	t.wait = histogram("acquire.wait", "How long calls for locks took, granted or not.")
	t.hold = histogram("hold", "How long locks were held.")
	t.renewal = histogram("renewal.interval", "Time between a renewal and the one before, or the acquisition.")
	t.txWait = histogram("tx_lock.wait", "How long calls of LockTx took, granted or not.")
	t.limitWait = histogram("limit.wait", "How long calls of a rate limiter took, allowed or not.")
	t.run = histogram("run", "How long runs of package once took.")
	t.busy = counter("busy", "{call}", "Calls that found the key held or waited for.")
	t.renewals = counter("renewals", "{renewal}", "Renewals: ok, late (more than half of the TTL after the last one), or why they failed.")
	t.lost = counter("lost", "{lock}", "Locks that were lost: evicted, or lost for another reason.")
	t.releases = counter("releases", "{lock}", "Locks that were released; if not ok, others may wait for the TTL.")
	t.claims = counter("claims", "{claim}", "Claims: ok, skipped if they were claimed before, or why they failed.")
	t.runs = counter("runs", "{run}", "Runs that were asked for: ok if they were started, skipped if another process has them.")
	t.evictions = counter("evictions", "{lock}", "Locks that this process evicted: ok, skipped if the holder was gone, or why not.")
	t.held = gauge("held", "{lock}", "Locks that this process holds.")
	t.waiting = gauge("waiting", "{call}", "Calls of this process that wait for a lock.")
	t.leading = gauge("leading", "{term}", "Terms of this process as leader.")
	if failed != nil {
		return nil, failed
	}
	return t, nil
}

// Observe makes spans and metrics of an event. It is for the field Observe of each config,
// and for the option [pgxlock.Observe].
func (t *Telemetry) Observe(ctx context.Context, e pgxlock.Event) {
	about := []attribute.KeyValue{attribute.String("pgxlock.group", t.groups.Of(e.Key))}
	if e.Kind != 0 {
		about = append(about, attribute.String("pgxlock.kind", e.Kind.String()))
	}
	result := e.Result()
	of := metric.WithAttributeSet(attribute.NewSet(about...))
	with := metric.WithAttributeSet(attribute.NewSet(append(about[:len(about):len(about)], attribute.String("pgxlock.result", result))...))
	switch e.Op {
	case pgxlock.EventBusy:
		t.busy.Add(ctx, 1, of)
		t.waiting.Add(ctx, 1, of)
	case pgxlock.EventWait:
		if e.Busy {
			t.waiting.Add(ctx, -1, of)
		}
		t.wait.Record(ctx, e.Wait.Seconds(), with)
		t.span(ctx, "pgxlock.acquire", e, e.Wait, about, result)
	case pgxlock.EventAcquired:
		t.held.Add(ctx, 1, of)
		for _, result := range []string{"lost", "evicted"} { // Prometheus sees no increase in a counter that begins at 1
			t.lost.Add(ctx, 0, metric.WithAttributeSet(attribute.NewSet(append(about[:len(about):len(about)], attribute.String("pgxlock.result", result))...)))
		}
	case pgxlock.EventRenewed:
		t.renewal.Record(ctx, e.SinceRenewal.Seconds(), of)
		t.renewals.Add(ctx, 1, with)
	case pgxlock.EventLost:
		t.lost.Add(ctx, 1, with)
		t.ended(ctx, e, of, about, result)
	case pgxlock.EventReleased:
		t.releases.Add(ctx, 1, with)
		t.ended(ctx, e, of, about, result)
	case pgxlock.EventTerm:
		t.leading.Add(ctx, 1, of)
	case pgxlock.EventTermEnded:
		t.leading.Add(ctx, -1, of)
		t.span(ctx, "pgxlock.term", e, e.Held, about, result)
	case pgxlock.EventTxLock:
		t.txWait.Record(ctx, e.Wait.Seconds(), with)
		t.span(ctx, "pgxlock.tx_lock", e, e.Wait, about, result)
	case pgxlock.EventClaim:
		t.claims.Add(ctx, 1, with)
		t.span(ctx, "pgxlock.claim", e, e.Wait, about, result)
	case pgxlock.EventLimit:
		t.limitWait.Record(ctx, e.Wait.Seconds(), with)
		t.span(ctx, "pgxlock.limit", e, e.Wait, about, result)
	case pgxlock.EventRun:
		t.runs.Add(ctx, 1, with)
	case pgxlock.EventRunEnded:
		t.run.Record(ctx, e.Held.Seconds(), with)
		t.span(ctx, "pgxlock.run", e, e.Held, about, result)
	case pgxlock.EventEvicted:
		t.evictions.Add(ctx, 1, with)
	}
}

// ended counts the end of a lock, released or lost.
func (t *Telemetry) ended(ctx context.Context, e pgxlock.Event, of metric.MeasurementOption, about []attribute.KeyValue, result string) {
	t.held.Add(ctx, -1, of)
	t.hold.Record(ctx, e.Held.Seconds(), of)
	t.span(ctx, "pgxlock.hold", e, e.Held, about, result)
}

// span makes the span of what the event ended, and which took that long. An error's text
// may have a key in it: without Keys the status has the result alone.
func (t *Telemetry) span(ctx context.Context, name string, e pgxlock.Event, took time.Duration, about []attribute.KeyValue, result string) {
	attributes := append(about[:len(about):len(about)], attribute.String("pgxlock.result", result))
	if e.Token != 0 {
		attributes = append(attributes, attribute.Int64("pgxlock.token", e.Token))
	}
	if t.keys {
		attributes = append(attributes, attribute.String("pgxlock.key", e.Key), attribute.String("pgxlock.holder", e.Holder))
	}
	_, span := t.tracer.Start(ctx, name, trace.WithTimestamp(e.Time.Add(-took)), trace.WithAttributes(attributes...))
	if e.Err != nil && result != "busy" && result != "limited" && result != "skipped" { // which callers expect
		says := result
		if t.keys {
			says = e.Err.Error()
		}
		span.SetStatus(codes.Error, says)
	}
	span.End(trace.WithTimestamp(e.Time))
}
