package serve

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

const (
	// minAge is how old a snapshot must be before another one is read: each blocks the
	// server's lock table for a moment.
	minAge = time.Second

	// A snapshot that took long is kept for restFactor times that, at most maxAge: for programs reading
	// 100,000 leases takes the command and the server a third of a second of processor time.
	restFactor = 20
	maxAge     = 10 * time.Second

	// readTimeout bounds one read, so that a dead network shows on the page.
	readTimeout = 5 * time.Second
)

// A state is what all viewers see until the next one.
type state struct {
	shot      monitor.Snapshot // the last that could be read
	evictions []Eviction
	runs      []Run
	found     *diagnosis // nil: the doctor has not run yet
	cannot    string     // why this one could not be read, and the shot is an earlier one
	at        time.Time
	history   []sample
	losses    []Loss // of the last hour
	renewals  *monitor.Renewals
	graph     func() *forest
	live      *sync.Map // of queries, as links: the part of the page that changes, func() []byte
}

// partly reports whether there are more leases than were read.
func (now *state) partly() bool { return errors.Is(now.shot.Unread.Leases, monitor.ErrTooMany) }

// A feed reads one snapshot for all viewers.
type feed struct {
	read  func(ctx context.Context, before *state) *state
	every time.Duration

	mu      sync.Mutex
	last    *state
	rest    time.Duration // how old it must be before another one is read
	changes int           // how often viewers have changed something
	seen    int           // changes when the last state began to be read
	reading bool
	changed chan struct{} // closed with each new state
	viewers int
	stop    context.CancelFunc // of the goroutine that reads while there are viewers
}

// newFeed returns a feed of what a Monitor sees.
func (s *Server) newFeed(locks *monitor.Monitor) *feed {
	return &feed{
		read:  func(ctx context.Context, before *state) *state { return s.read(ctx, locks, before) },
		every: s.cfg.Every, changed: make(chan struct{}),
	}
}

// get returns a state that is at most a second old, or older if it took long to read, and shows what
// viewers have changed; or reads one with all who ask at that moment. It fails only if ctx ends
// first.
func (f *feed) get(ctx context.Context) (*state, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.last == nil || f.seen < f.changes || time.Since(f.last.at) >= f.rest {
		if !f.reading {
			f.reading = true
			go f.renew(context.WithoutCancel(ctx), f.last, f.changes) // a viewer that leaves takes nothing from the others
		}
		changed := f.changed
		f.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		f.mu.Lock()
		if ctx.Err() != nil {
			return f.last, ctx.Err()
		}
	}
	return f.last, nil
}

// change says that a viewer has changed something, which the last state does not show.
func (f *feed) change() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changes++
}

func (f *feed) renew(ctx context.Context, before *state, changes int) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	began := time.Now()
	now := f.read(ctx, before)
	took := time.Since(began)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rest = minAge
	if now.cannot == "" && before != nil && before.cannot == "" { // else it also took the time to connect
		f.rest = max(minAge, min(restFactor*took, maxAge))
	}
	f.last, f.seen, f.reading = now, changes, false
	close(f.changed)
	f.changed = make(chan struct{})
}

// mostViewers bounds how many streams are open at once: each is a goroutine and a socket.
const mostViewers = 256

// errCrowded means that there are too many viewers.
var errCrowded = errors.New("too many viewers")

// join adds a viewer, for whom the feed reads until leave is called.
func (f *feed) join() (leave func(), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.viewers >= mostViewers {
		return nil, errCrowded
	}
	if f.viewers++; f.viewers == 1 {
		ctx, cancel := context.WithCancel(context.Background())
		f.stop = cancel
		go f.follow(ctx, f.every)
	}
	return f.leave, nil
}

func (f *feed) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.viewers--; f.viewers == 0 {
		f.stop()
	}
}

// follow reads a state at each interval, until ctx ends.
func (f *feed) follow(ctx context.Context, interval time.Duration) {
	repeat(ctx, interval, func() { _, _ = f.get(ctx) }) // which fails only if ctx has ended
}

// repeat calls do at once and then at each interval, until ctx ends.
func repeat(ctx context.Context, interval time.Duration, do func()) {
	for ticks := time.Tick(interval); ctx.Err() == nil; {
		do()
		select {
		case <-ticks:
		case <-ctx.Done():
		}
	}
}

// Record reads a state twice a minute until ctx ends, so that the plots show the last hour
// also if nobody looked, and asks the doctor every 5 minutes.
func (s *Server) Record(ctx context.Context) {
	if s.cfg.Check != nil {
		go repeat(ctx, examineEvery, func() { s.examine(ctx) })
	}
	s.feed.follow(ctx, beat)
}

// next returns what is closed when the state after the last one is there.
func (f *feed) next() (last *state, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last, f.changed
}

// read reads a state. What cannot be read is said, beside the last shot that could be.
func (s *Server) read(ctx context.Context, locks *monitor.Monitor, before *state) *state {
	now := new(state)
	var err error
	now.shot, err = locks.Snapshot(ctx)
	if err == nil {
		now.evictions = beside(ctx, s, now, "evictions", s.cfg.Evictions)
		now.runs = beside(ctx, s, now, "runs", s.cfg.Runs)
	}
	if err != nil {
		if before != nil {
			*now = *before
		}
		if outer, ok := errors.AsType[*pgxlock.Error](err); ok {
			err = outer.Err // that it was a snapshot helps nobody
		}
		now.cannot = s.cfg.Describe(err)
	}
	for i, missing := range now.shot.Missing {
		now.shot.Missing[i] = s.cfg.Advise(missing)
	}
	if locks == s.cfg.Locks {
		s.report(before, now)
	}
	now.at, now.found = time.Now(), s.found.Load()
	now.remember(before)
	now.graph = sync.OnceValue(func() *forest { return plant(now.shot) })
	now.live = new(sync.Map)
	return now
}

// report logs that the database cannot be read, or can be read again, and what the first
// snapshot lacks: later ones may lack as much, in other words.
func (s *Server) report(before, now *state) {
	if before == nil || before.shot.At.IsZero() {
		for _, missing := range now.shot.Missing {
			s.cfg.Log("not shown: " + missing)
		}
	}
	failed := before != nil && before.cannot != ""
	switch {
	case now.cannot != "" && !failed:
		s.cfg.Log(now.cannot)
	case now.cannot == "" && failed:
		s.cfg.Log("the database can be read again")
	}
}

// beside reads what is shown beside a shot, unless read is nil; what cannot be read is said.
func beside[Row any](ctx context.Context, s *Server, now *state, what string, read func(context.Context) ([]Row, error)) []Row {
	if read == nil {
		return nil
	}
	rows, err := read(ctx)
	if err != nil {
		now.shot.Missing = append(now.shot.Missing, what+": "+s.cfg.Describe(err))
		return nil
	}
	return rows
}
