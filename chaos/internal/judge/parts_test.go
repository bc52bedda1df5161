package judge

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/anishathalye/porcupine"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// invented returns the history of a lock that does as it should, or nearly: one of `wrong` grants
// is made though there is no room.
func invented(random *rand.Rand, requests, wrong int) []history.Event {
	kind := []history.Kind{history.Lease, history.Advisory, history.Permit}[random.IntN(3)]
	limit := 0
	if kind == history.Permit {
		limit = 1 + random.IntN(3)
	}
	now, token := int64(1), int64(0)
	tick := func() int64 { now += 1 + random.Int64N(4); return now }
	var events []history.Event
	write := func(e history.Event) {
		e.Process, e.Mono = fmt.Sprintf("p%d", e.Op%4), tick()
		events = append(events, e)
	}
	type hold struct {
		op        int64
		shared    bool
		told      bool // the call has returned
		forgotten bool // it returns when the lock has ended
		until     int64
		token     int64
	}
	var waiting, answers []hold
	var held []hold
	for op := int64(1); op <= int64(requests) || len(waiting)+len(answers)+len(held) > 0; {
		switch random.IntN(4) {
		case 0:
			if op <= int64(requests) && len(waiting) < 6 {
				h := hold{op: op, shared: kind != history.Permit && random.IntN(3) == 0, forgotten: random.IntN(10) == 0}
				write(history.Event{What: history.Ask, Op: op, Kind: kind, Key: "a", Shared: h.shared, Limit: limit})
				waiting = append(waiting, h)
				op++
			}
		case 1: // the server grants
			if len(waiting) == 0 {
				continue
			}
			i := random.IntN(len(waiting))
			h := waiting[i]
			room := true
			for _, o := range held {
				room = room && h.shared && o.shared
			}
			if kind == history.Permit {
				room = len(held) < limit
			}
			if !room && (wrong == 0 || random.IntN(wrong) > 0) {
				continue
			}
			waiting = append(waiting[:i], waiting[i+1:]...)
			token++
			h.token = token
			held = append(held, h)
		case 2: // a call returns
			if len(held) == 0 {
				continue
			}
			h := &held[random.IntN(len(held))]
			if h.told || h.forgotten {
				continue
			}
			e := history.Event{What: history.Granted, Op: h.op, Token: h.token}
			if random.IntN(2) == 0 {
				h.until = now + random.Int64N(20)
				e.Deadline = h.until
			}
			write(e)
			h.told = true
		case 3: // a lock ends
			if len(held) == 0 {
				continue
			}
			i := random.IntN(len(held))
			h := held[i]
			if !h.told && !h.forgotten {
				continue
			}
			held = append(held[:i], held[i+1:]...)
			switch {
			case h.forgotten:
				answers = append(answers, h)
			case random.IntN(4) > 0:
				write(history.Event{What: history.ReleaseAsk, Op: h.op})
				write(history.Event{What: history.Released, Op: h.op})
			default: // its process died after its deadline
				now = max(now, h.until)
			}
		}
		if len(answers) > 0 && random.IntN(5) == 0 {
			write(history.Event{What: history.Granted, Op: answers[0].op, Token: answers[0].token})
			answers = answers[1:]
		}
	}
	return events
}

// A history is judged alike whole, cut wherever it can be, and narrowed.
func TestCutsChangeNoVerdict(t *testing.T) {
	cuts, refused, swept := 0, 0, 0
	for seed := range uint64(1000) {
		random := rand.New(rand.NewPCG(seed, 1))
		wrong := 0
		if seed%2 == 1 {
			wrong = 20
		}
		r, err := read(invented(random, 2+random.IntN(24), wrong))
		if err != nil {
			t.Fatal(err)
		}
		verdict := func(parts []part) bool {
			for _, p := range parts {
				if !porcupine.CheckOperations(p.model, p.operations) {
					return false
				}
			}
			return true
		}
		narrowed := func(parts []part) bool {
			for i := range parts {
				parts[i].operations = narrow(parts[i].operations)
			}
			return verdict(parts)
		}
		whole, cut := r.locks[0].parts(never), r.locks[0].parts(1)
		cuts += len(cut) - len(whole)
		ok := verdict(whole)
		if !ok {
			refused++
		}
		if got := verdict(cut); got != ok {
			t.Fatalf("seed %d: whole %v, cut %v", seed, ok, got)
		}
		if got := narrowed(whole); got != ok {
			t.Fatalf("seed %d: whole %v, narrowed %v", seed, ok, got)
		}
		if !ok && wrong == 0 {
			t.Fatalf("seed %d: a history of a lock that does as it should is refused", seed)
		}
		var v Verdict
		exclusion(r, &v)
		permits(r, &v)
		if len(v.Violations) > 0 {
			if swept++; ok {
				t.Fatalf("seed %d: porcupine accepts what is violated: %s", seed, v.Violations[0])
			}
		}
	}
	t.Logf("%d cuts, %d histories refused, %d of them by the checkers of known holders too", cuts, refused, swept)
	if cuts < 300 || refused < 50 || swept < 50 {
		t.Error("too few to compare")
	}
}

// A long history of callers that wait all the time is judged in parts.
func TestLongHistoriesAreJudgedInParts(t *testing.T) {
	var events []history.Event
	const callers, grants = 64, 6000
	for op := range int64(grants + callers) {
		at := max(0, op-callers) * 10
		events = append(events, history.Event{Process: "p", Caller: int(op % callers), Op: op, Mono: at + 1, What: history.Ask, Kind: history.Lease, Key: "a"})
		if op >= callers {
			granted := op - callers
			events = append(events, history.Event{Process: "p", Op: granted, Mono: at + 3, What: history.Granted, Token: op},
				history.Event{Process: "p", Op: granted, Mono: at + 5, What: history.ReleaseAsk},
				history.Event{Process: "p", Op: granted, Mono: at + 7, What: history.Released})
		}
	}
	r, err := read(events)
	if err != nil {
		t.Fatal(err)
	}
	var v Verdict
	linearizable(r, &v)
	if parts := len(r.locks[0].parts(longest)); v.Checked != 2*grants || len(v.Unknown) > 0 || len(v.Violations) > 0 || parts != 2*grants/longest {
		t.Errorf("%d operations in %d parts: violations %v, unknown %v", v.Checked, parts, v.Violations, v.Unknown)
	}
}
