package judge

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// never is the time of what has not happened by the end of the history.
const never = math.MaxInt64

// A run is a history, sorted by what its events are about.
type run struct {
	requests    []*request // in the order in which they were asked
	locks       []*lock
	seen        map[string]int64 // when each process wrote its last event
	writes      []*write
	rows        []row
	faults      []*fault
	connections []history.Event
	left        []history.Event
	pictures    string // a folder, or none
}

// A lock is what excludes: all requests for one key, by leases of both durabilities together.
type lock struct {
	kind     history.Kind
	key      string
	requests []*request // in the order in which they were asked
}

// granted returns the requests that were granted, in the order in which that was answered.
func (l *lock) granted() []*request {
	granted := slices.DeleteFunc(slices.Clone(l.requests), func(q *request) bool { return !q.granted() })
	slices.SortStableFunc(granted, func(a, b *request) int { return cmp.Compare(a.answered, b.answered) })
	return granted
}

func (l *lock) String() string { return fmt.Sprintf("%s %q", l.kind, l.key) }

// A request is an Ask and what followed it.
type request struct {
	ask      history.Event
	answer   history.What // Granted, Refused, Withdrawn or Unknown; empty: none came
	answered int64        // never: no answer came
	waiting  int64        // since when it is known to wait; never: it did not
	period   string
	holder   string
	token    int64
	permit   int
	ttl      time.Duration
	deadline int64   // the last local deadline that is known; 0: none
	checks   []int64 // the beginnings of checks that found the lock held
	lost     int64   // when the holder noticed the loss
	steps    int64   // when the leader noticed that it was asked to step down

	endAsked int64        // when a release or commit began
	end      history.What // Released, Committed, RolledBack or Unknown; empty: no answer came
	ended    int64        // when that came

	// heldUntil is the last moment at which the lock is known to have been held: it ended then or
	// later. Where nothing is known it is the moment of the Ask.
	heldUntil int64
}

func (q *request) String() string { return fmt.Sprintf("%s#%d", q.ask.Process, q.ask.Op) }

func (q *request) caller() string { return fmt.Sprintf("%s/%d", q.ask.Process, q.ask.Caller) }

func (q *request) granted() bool { return q.answer == history.Granted }

// held reports whether the lock is known to have been held at some time after the call returned:
// from answered to heldUntil.
func (q *request) held() bool { return q.granted() && q.heldUntil > q.answered }

// conflicts reports whether two holders of a lock that is no semaphore exclude each other.
func (q *request) conflicts(o *request) bool { return !q.ask.Shared || !o.ask.Shared }

// A write is a WriteAsk and what followed it.
type write struct {
	ask         history.Event
	under       *request // whose token it writes with
	commitAsked int64
	answer      history.What // Wrote, WriteRefused or WriteUnknown; empty: none came
	rows        int          // how many of its rows the server has
}

func (w *write) String() string { return fmt.Sprintf("write %d of %s", w.ask.Write, w.under) }

// A row is what the server has of a write.
type row struct {
	history.Event
	of *write
}

// A fault lasts from its begin to its end, or to the end of the history.
type fault struct {
	history.Event
	ended  int64
	failed bool
}

// evicts reports whether an administrator evicted the holder of a request, or tried to. The holder of an advisory lock
// is a session, which may acquire it again.
func (f *fault) evicts(q *request) bool {
	return f.Fault == history.Evict && f.Holder == q.holder && f.Key == q.ask.Key && (q.ask.Kind != history.Advisory || q.answered < f.Mono)
}

// operation names a request, a write or a fault.
type operation struct {
	process string
	number  int64
}

// excludes is the kind of lock that a kind of request is for.
func excludes(kind history.Kind) history.Kind {
	switch kind {
	case history.LeaseAsync, history.Set, history.DoTx, history.Lead:
		return history.Lease
	}
	return kind
}

// isLock reports whether a kind of request is for a lock.
func isLock(kind history.Kind) bool {
	return !slices.Contains([]history.Kind{history.Limit, history.Claim, history.Once, history.StepDown}, kind)
}

// read sorts events, which are in the order of their clock. An answer to nothing is an error: a
// writer that is killed may lose its last event only.
func read(events []history.Event) (*run, error) {
	r := &run{seen: map[string]int64{}}
	requests, writes, faults := map[operation]*request{}, map[operation]*write{}, map[operation]*fault{}
	locks := map[[2]string]*lock{}
	for _, e := range events {
		op := operation{e.Process, e.Op}
		q := requests[op]
		w := writes[operation{e.Process, e.Write}]
		missing := fmt.Errorf("history: %s of %s#%d, write %d, answers nothing", e.What, e.Process, e.Op, e.Write)
		if e.What != history.Row { // which another process has read
			r.seen[e.Process] = e.Mono
		}
		switch e.What {
		case history.Ask:
			if q != nil {
				return nil, fmt.Errorf("history: %s#%d is asked twice", e.Process, e.Op)
			}
			q = &request{ask: e, answered: never, waiting: never, lost: never, steps: never, endAsked: never, ended: never, period: e.Period}
			requests[op] = q
			r.requests = append(r.requests, q)
			id := [2]string{string(excludes(e.Kind)), e.Key}
			if isLock(e.Kind) && locks[id] == nil {
				locks[id] = &lock{kind: excludes(e.Kind), key: e.Key}
				r.locks = append(r.locks, locks[id])
			}
			if isLock(e.Kind) {
				locks[id].requests = append(locks[id].requests, q)
			}
		case history.WriteAsk:
			if q == nil {
				return nil, missing
			}
			w = &write{ask: e, under: q, commitAsked: never}
			writes[operation{e.Process, e.Write}] = w
			r.writes = append(r.writes, w)
		case history.Wrote, history.WriteRefused, history.WriteUnknown:
			if w == nil {
				return nil, missing
			}
			w.answer = e.What
		case history.Row:
			if w == nil {
				return nil, missing
			}
			w.rows++
			r.rows = append(r.rows, row{e, w})
		case history.FaultBegun:
			faults[op] = &fault{Event: e, ended: never}
			r.faults = append(r.faults, faults[op])
		case history.FaultEnded:
			if faults[op] == nil {
				return nil, missing
			}
			faults[op].ended, faults[op].failed = e.Mono, e.Err != ""
		case history.Connections:
			r.connections = append(r.connections, e)
		case history.Left:
			r.left = append(r.left, e)
		case history.CommitAsk:
			switch {
			case w != nil:
				w.commitAsked = e.Mono
			case q != nil:
				q.endAsked = e.Mono
			default:
				return nil, missing
			}
		default:
			if q == nil {
				return nil, missing
			}
			if err := q.follow(e); err != nil {
				return nil, err
			}
		}
	}
	for _, q := range r.requests {
		q.heldUntil = r.heldUntil(q)
	}
	return r, nil
}

// follow adds what followed the Ask.
func (q *request) follow(e history.Event) error {
	switch e.What {
	case history.Waiting:
		q.waiting = e.Mono
	case history.Unknown:
		if q.granted() {
			q.end, q.ended = e.What, e.Mono
			return nil
		}
		fallthrough
	case history.Granted, history.Refused, history.Withdrawn:
		if q.answer != "" {
			return fmt.Errorf("history: %s is answered twice", q)
		}
		q.answer, q.answered = e.What, e.Mono
		q.holder, q.token, q.permit, q.ttl, q.deadline = e.Holder, e.Token, e.Permit, e.TTL, e.Deadline
		if e.Period != "" {
			q.period = e.Period
		}
	case history.Renewed:
		q.deadline = max(q.deadline, e.Deadline)
	case history.Held:
		q.checks = append(q.checks, e.Began)
	case history.Lost:
		q.lost = min(q.lost, e.Mono)
	case history.StepsDown:
		q.steps = e.Mono
	case history.ReleaseAsk:
		q.endAsked = min(q.endAsked, e.Mono)
	case history.Released, history.Committed, history.RolledBack:
		q.end, q.ended = e.What, e.Mono
	default:
		return fmt.Errorf("history: unknown event %q", e.What)
	}
	return nil
}

// heldUntil returns the last moment at which a lock is known to have been held.
//
// A Release that succeeded says that the lock was held until it was called. Otherwise it was held
// at each moment at which a check found it held, and a lease until its last known deadline at
// least. Where belief proves nothing, the lock may have ended before its holder had it.
func (r *run) heldUntil(q *request) int64 {
	async := q.ask.Kind == history.LeaseAsync // of which a crash may take back even what is released
	if q.end == history.Released && !async {
		return q.endAsked
	}
	if !q.granted() || !r.believed(q) {
		return q.ask.Mono
	}
	if q.end == history.Released {
		return q.endAsked
	}
	until := q.ask.Mono
	if excludes(q.ask.Kind) == history.Lease || q.ask.Kind == history.Permit {
		until = q.deadline
	}
	for _, began := range q.checks {
		until = max(until, began)
	}
	return min(until, q.endAsked, q.lost)
}

// lingering is how long after its end a fault may still end a session or a grant.
const lingering = 10 * time.Second

// believed reports whether a lock is held whenever its holder finds it held. A lease that is evicted is not; the
// holder of an advisory lock loses it before the session does.
func (r *run) believed(q *request) bool {
	if q.ask.Kind != history.Advisory && slices.ContainsFunc(r.faults, func(f *fault) bool { return f.evicts(q) }) {
		return false
	}
	from, to := q.ask.Mono-int64(lingering), min(q.endAsked, q.lost)
	switch q.ask.Kind {
	case history.LeaseAsync: // a crash may take the grant back
		return !r.faulty(from, to, q.ask.Process, history.Crash, history.Promote)
	case history.Advisory: // the session may end before its holder knows
		return !r.faulty(from, to, q.ask.Process, endSessions...)
	default: // a lease outlives belief, and a transaction's lock is checked by asking the server
		return true
	}
}

// endSessions are the faults that may end a session whose process lives.
var endSessions = []history.Fault{
	history.Cut, history.Delay, history.Swallow, history.LoseAnswer, history.Terminate, history.Crash, history.Restart,
	history.FreezeServer, history.Promote, history.Exhaust, history.LockTable, history.Timeouts, history.Pause,
}

// faulty reports whether a fault of one of these names, or of any if none is named, concerned a
// process at any time from begin to end. An empty process means all.
func (r *run) faulty(begin, end int64, process string, names ...history.Fault) bool {
	return slices.ContainsFunc(r.faults, func(f *fault) bool {
		return f.Mono <= end && f.ended >= begin && (process == "" || f.Target == "" || f.Target == process) &&
			(len(names) == 0 || slices.Contains(names, f.Fault))
	})
}

// at is a time of the history in the texts of violations.
func at(t int64) string {
	if t == never {
		return "never"
	}
	return fmt.Sprintf("%.6f s", time.Duration(t).Seconds())
}
