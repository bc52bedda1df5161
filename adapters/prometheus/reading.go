package pgxlockprom

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/monitor"
)

// checkEvery is the shortest time between two runs of the doctor's checks.
const checkEvery = 5 * time.Minute

const (
	defaultTimeout = 5 * time.Second
	defaultEvery   = 5 * time.Second
)

// tokensOfTimeline is how many tokens one timeline of the server has: the bits that
// 000001_leases leaves to the sequence.
const tokensOfTimeline = 1 << 40

// describe makes the description of a metric.
func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("pgxlock_"+name, help, labels, nil)
}

var (
	up            = describe("collector_up", "1 if the last reading of the database succeeded, otherwise 0.")
	duration      = describe("collector_duration_seconds", "How long the last reading of the database took.")
	unreadable    = describe("collector_unreadable", "How many things the role, the schema or a standby cannot show; pgxlock watch lists them.")
	holders       = describe("holders", "Locks that are held in the database, by any program.", "kind", "mode")
	oldestHold    = describe("oldest_hold_seconds", "For how long the lease that is held longest has been held.")
	expired       = describe("expired_leases", "Leases that expired and were not released, by state: abandoned after an hour, evicted if an operator ended them.", "state")
	suspect       = describe("suspect_leases", "Leases that began later than the server's clock shows now: the clock was set back.")
	late          = describe("late_leases", "Leases that were renewed before and are not any more: the holder hangs, crashed, or cannot reach the server.")
	waiters       = describe("waiters", "Callers that wait for a lock, in all processes.", "kind")
	oldestWait    = describe("oldest_wait_seconds", "For how long the caller that waits longest has waited.", "kind")
	tableEntries  = describe("lock_table_entries", "Entries of the server's lock table that all sessions of all databases use.")
	tableCapacity = describe("lock_table_capacity", "Entries that the server's lock table has room for, at least.")
	notifications = describe("notification_queue_ratio", "How full the server's notification queue is, from 0 to 1.")
	oldestTx      = describe("oldest_transaction_seconds", "For how long the transaction with the oldest snapshot has been open: it holds back vacuum.")
	tokens        = describe("tokens_used_ratio", "Which part of the tokens of the server's timeline was drawn, seen from the leases that exist, from 0 to 1.")
	checks        = describe("check_status", "The finding of each check of pgxlock doctor that this role may make: 0 ok, 1 warning, 2 error.", "check")
)

// A collector shows the state of a database. It reads when it is scraped.
type collector struct {
	pool  *pgxpool.Pool
	locks *monitor.Monitor
	cfg   CollectorConfig

	mu      sync.Mutex // held while the database is read: scrapes at one time share a reading
	read    time.Time  // when the state was read; zero: never
	state   state
	seen    *monitor.Renewals
	checked time.Time
	status  map[string]string
}

// state is what one reading found.
type state struct {
	ok   bool
	took time.Duration
	shot monitor.Snapshot
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		up, duration, unreadable, holders, oldestHold, expired, suspect, late, waiters, oldestWait,
		tableEntries, tableCapacity, notifications, oldestTx, tokens, checks,
	} {
		to <- d
	}
}

// Collect implements prometheus.Collector. If the database cannot be read there is nothing
// but collector_up, which is 0: old figures would look like new ones. If a part of it cannot be
// read, that part is left out: 0 would look like a count.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	s, status := c.current()
	tell := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	tell(duration, s.took.Seconds())
	if !s.ok {
		tell(up, 0)
		return
	}
	tell(up, 1)
	tell(unreadable, float64(len(s.shot.Missing)))
	s.emitHolders(tell)
	s.tellWaiters(tell)
	tell(tableEntries, float64(s.shot.Load.Locks))
	tell(tableCapacity, float64(s.shot.Load.Room))
	tell(notifications, s.shot.Load.Notifications)
	tell(oldestTx, s.since(s.shot.Load.OldestSince))
	for check, is := range status {
		if level, looked := map[string]float64{"ok": 0, "warning": 1, "error": 2}[is]; looked {
			tell(checks, level, check)
		}
	}
}

// current returns the state, which it reads if the last one is too old.
func (c *collector) current() (state, map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.read.IsZero() || time.Since(c.read) >= c.cfg.Every {
		c.readLocked()
	}
	return c.state, c.status
}

func (c *collector) readLocked() {
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Timeout)
	defer cancel()
	began := time.Now()
	var s state
	var err error
	s.shot, err = c.locks.Snapshot(ctx)
	if s.ok = err == nil; s.ok {
		c.seen = c.seen.With(&s.shot)
	}
	if due := c.checked.IsZero() || time.Since(c.checked) >= checkEvery; s.ok && due && c.cfg.Doctor {
		if status, err := c.checks(ctx); err == nil {
			c.status, c.checked = status, time.Now()
		}
	}
	c.read = time.Now()
	s.took = c.read.Sub(began)
	c.state = s
}

// checks returns how serious the finding of each check of the doctor is.
func (c *collector) checks(ctx context.Context) (map[string]string, error) {
	findings, err := doctor.Check(ctx, c.pool, &doctor.Config{Schema: c.cfg.Schema})
	status := make(map[string]string)
	for _, f := range findings {
		status[f.Check] = string(f.Status)
	}
	return status, err
}

// since returns the seconds from a time of the server's clock; 0 if it is not known.
func (s *state) since(at time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return max(s.shot.At.Sub(at).Seconds(), 0)
}

var (
	kinds = []pgxlock.Kind{pgxlock.KindAdvisory, pgxlock.KindLease}
	modes = map[pgxlock.Mode]string{pgxlock.Exclusive: "exclusive", pgxlock.Shared: "shared"}
)

func (s *state) emitHolders(tell func(*prometheus.Desc, float64, ...string)) {
	type of struct {
		kind pgxlock.Kind
		mode pgxlock.Mode
	}
	held := make(map[of]int)
	var oldest, drawn float64
	var clockBack, renewedNoMore int
	for _, h := range s.shot.Holders {
		held[of{h.Kind, h.Mode}]++
		if h.Kind == pgxlock.KindLease {
			oldest = max(oldest, s.since(h.Since))
		}
		if h.Suspect {
			clockBack++
		}
		if h.Late {
			renewedNoMore++
		}
	}
	states := map[string]int{"expired": 0, "abandoned": 0, "evicted": 0}
	for _, h := range s.shot.Expired {
		if h.EvictedBy != "" { // its holder did not die
			states["evicted"]++
		} else {
			states[string(h.State)]++
		}
	}
	for _, list := range [][]pgxlock.Holder{s.shot.Holders, s.shot.Expired} {
		for _, h := range list {
			if h.Kind == pgxlock.KindLease && h.Token > 0 {
				drawn = max(drawn, float64(h.Token%tokensOfTimeline)/tokensOfTimeline)
			}
		}
	}
	leases := s.shot.Unread.Leases == nil || held[of{pgxlock.KindLease, pgxlock.Exclusive}]+held[of{pgxlock.KindLease, pgxlock.Shared}] > 0 // those beyond the bound are left out
	for kind, read := range map[pgxlock.Kind]bool{pgxlock.KindAdvisory: s.shot.Unread.Advisory == nil, pgxlock.KindLease: leases} {
		for mode, name := range modes {
			if read {
				tell(holders, float64(held[of{kind, mode}]), kind.String(), name)
			}
		}
	}
	if !leases {
		return
	}
	tell(oldestHold, oldest)
	tell(suspect, float64(clockBack))
	tell(late, float64(renewedNoMore))
	for is, n := range states {
		tell(expired, float64(n), is)
	}
	tell(tokens, drawn)
}

func (s *state) tellWaiters(tell func(*prometheus.Desc, float64, ...string)) {
	if s.shot.Unread.Queues != nil && len(s.shot.Waiters) == 0 {
		return
	}
	waiting := make(map[pgxlock.Kind]int)
	longest := make(map[pgxlock.Kind]float64)
	for _, w := range s.shot.Waiters {
		waiting[w.Kind] += 1 + w.Behind
		longest[w.Kind] = max(longest[w.Kind], s.since(w.Since))
	}
	for _, kind := range kinds {
		if kind == pgxlock.KindAdvisory && s.shot.Unread.Advisory != nil {
			continue
		}
		tell(waiters, float64(waiting[kind]), kind.String())
		tell(oldestWait, longest[kind], kind.String())
	}
}
