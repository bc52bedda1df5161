// Package pgxlockprom makes metrics for Prometheus of what locks do.
//
//	metrics, err := pgxlockprom.New(prometheus.DefaultRegisterer, nil)
//	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Observe: metrics.Observe})
//
// [New] counts the events of this process. [NewCollector] shows the locks of a database, of
// all programs. docs/metrics.md lists the metrics. No label has a key as its value unless
// [Config.Group] makes one of it.
package pgxlockprom

import (
	"context"
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/observe"
)

// Config configures [New]. A nil *Config means the defaults.
type Config struct {
	// Group returns the value of the label group for a key: invoice for invoice:17. It is
	// called in Observe, so it must be quick and safe for concurrent use. Default: all
	// keys are in one group, whose name is empty.
	Group func(key string) string

	// MaxGroups is how many values the label group has at most; keys of further groups
	// are counted as "other". Default: 100.
	MaxGroups int

	// Buckets are the upper bounds of the buckets of all histograms, in seconds. Default:
	// 13 buckets from 1 ms to half an hour.
	Buckets []float64
}

// Metrics counts the events of the Lockers, Limiters, Runners and Monitors of a process
// whose Observe is [Metrics.Observe]. It is safe for concurrent use.
type Metrics struct {
	groups *observe.Groups

	wait, hold, renewal, txWait, limitWait, run             *prometheus.HistogramVec
	busy, renewals, lost, releases, claims, runs, evictions *prometheus.CounterVec
	held, waiting, leading                                  *prometheus.GaugeVec
}

// New makes the metrics, and registers them.
func New(to prometheus.Registerer, cfg *Config) (*Metrics, error) {
	if to == nil {
		return nil, errors.New("pgxlockprom: the registerer is nil; pass prometheus.DefaultRegisterer")
	}
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if c.Buckets == nil {
		c.Buckets = observe.Seconds
	}
	m := &Metrics{groups: observe.NewGroups(c.Group, c.MaxGroups)}
	var all []prometheus.Collector
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "pgxlock_" + name, Help: help, Buckets: c.Buckets}, labels)
		all = append(all, v)
		return v
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "pgxlock_" + name, Help: help}, labels)
		all = append(all, v)
		return v
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "pgxlock_" + name, Help: help}, labels)
		all = append(all, v)
		return v
	}
	const group, kind, result = "group", "kind", "result"
	m.wait = histogram("acquire_wait_seconds", "How long calls for locks took, granted or not.", group, kind, result)
	m.hold = histogram("hold_seconds", "How long locks were held.", group, kind)
	m.renewal = histogram("renewal_interval_seconds", "Time between a renewal and the one before, or the acquisition.", group, kind)
	m.txWait = histogram("tx_lock_wait_seconds", "How long calls of LockTx took, granted or not.", group, result)
	m.limitWait = histogram("limit_wait_seconds", "How long calls of a rate limiter took, allowed or not.", group, result)
	m.run = histogram("run_seconds", "How long runs of package once took.", group, result)
	m.busy = counter("busy_total", "Calls that found the key held or waited for.", group, kind)
	m.renewals = counter("renewals_total", "Renewals: ok, late (more than half of the TTL after the last one), or why they failed.", group, kind, result)
	m.lost = counter("lost_total", "Locks that were lost: evicted, or lost for another reason.", group, kind, "reason")
	m.releases = counter("releases_total", "Locks that were released; if not ok, others may wait for the TTL.", group, kind, result)
	m.claims = counter("claims_total", "Claims: ok, skipped if they were claimed before, or why they failed.", group, result)
	m.runs = counter("runs_total", "Runs that were asked for: ok if they were started, skipped if another process has them.", group, result)
	m.evictions = counter("evictions_total", "Locks that this process evicted: ok, skipped if the holder was gone, or why not.", kind, result)
	m.held = gauge("held", "Locks that this process holds.", group, kind)
	m.waiting = gauge("waiting", "Calls of this process that wait for a lock.", group, kind)
	m.leading = gauge("leading", "Terms of this process as leader.", group, kind)
	for i, each := range all {
		if err := to.Register(each); err != nil {
			for _, before := range all[:i] {
				to.Unregister(before)
			}
			return nil, fmt.Errorf("pgxlockprom: %w", err)
		}
	}
	return m, nil
}

// Observe counts an event. It is for the field Observe of each config, and for the option
// [pgxlock.Observe].
func (m *Metrics) Observe(_ context.Context, e pgxlock.Event) {
	group, kind, result := m.groups.Of(e.Key), e.Kind.String(), e.Result()
	switch e.Op {
	case pgxlock.EventBusy:
		m.busy.WithLabelValues(group, kind).Inc()
		m.waiting.WithLabelValues(group, kind).Inc()
	case pgxlock.EventWait:
		if e.Busy {
			m.waiting.WithLabelValues(group, kind).Dec()
		}
		m.wait.WithLabelValues(group, kind, result).Observe(e.Wait.Seconds())
	case pgxlock.EventAcquired:
		m.held.WithLabelValues(group, kind).Inc()
		for _, reason := range []string{"lost", "evicted"} { // increase() does not see a counter that begins at 1
			m.lost.WithLabelValues(group, kind, reason)
		}
	case pgxlock.EventRenewed:
		m.renewal.WithLabelValues(group, kind).Observe(e.SinceRenewal.Seconds())
		m.renewals.WithLabelValues(group, kind, result).Inc()
	case pgxlock.EventLost:
		m.held.WithLabelValues(group, kind).Dec()
		m.hold.WithLabelValues(group, kind).Observe(e.Held.Seconds())
		m.lost.WithLabelValues(group, kind, result).Inc()
	case pgxlock.EventReleased:
		m.held.WithLabelValues(group, kind).Dec()
		m.hold.WithLabelValues(group, kind).Observe(e.Held.Seconds())
		m.releases.WithLabelValues(group, kind, result).Inc()
	case pgxlock.EventTerm:
		m.leading.WithLabelValues(group, kind).Inc()
	case pgxlock.EventTermEnded:
		m.leading.WithLabelValues(group, kind).Dec()
	case pgxlock.EventTxLock:
		m.txWait.WithLabelValues(group, result).Observe(e.Wait.Seconds())
	case pgxlock.EventClaim:
		m.claims.WithLabelValues(group, result).Inc()
	case pgxlock.EventLimit:
		m.limitWait.WithLabelValues(group, result).Observe(e.Wait.Seconds())
	case pgxlock.EventRun:
		m.runs.WithLabelValues(group, result).Inc()
	case pgxlock.EventRunEnded:
		m.run.WithLabelValues(group, result).Observe(e.Held.Seconds())
	case pgxlock.EventEvicted:
		m.evictions.WithLabelValues(kind, result).Inc()
	}
}
