package main

import (
	"math/rand/v2"
	"slices"
	"time"
)

// The kinds of locks, each of which has rounds of its own.
var allKinds = []string{"lease", "lease-async", "advisory", "shared", "permit", "limit", "claim", "once", "tx", "set", "dotx", "lead"}

// The faults; with none, which is alone in its rounds, order and shares can be judged.
var allFaults = []string{
	"kill", "freeze", "cut", "swallow", "delay", "lost-commit", "terminate", "crash", "promote",
	"pooler", "exhaust", "locktable", "timeouts", "clock", "evict", "none",
}

// What workers do if they are broken on purpose: they write without a fence, believe in their locks
// whatever pgxlock says, take locks without asking, acquire the locks of a set one after the other in
// any order, are content with a part of them, write outside of the transaction of DoTx, or take an answer
// of acquire_in_turn for a grant that is none.
var allBroken = []string{"unfenced", "deaf", "granting", "unordered", "partial", "outside", "refused"}

// A plan is what a round does. It is what the seed says, and all that a worker needs to know.
type plan struct {
	Round  int
	Seed   uint64
	Lasts  time.Duration
	Kind   string
	Faults []string
	Broken string

	Workers, Callers, Keys int
	Pause                  time.Duration // between two calls of a caller, at most
	Hold                   time.Duration // how long a caller holds, at most
	TTL                    time.Duration
	MaxWait                time.Duration // of some calls; 0: of none
	Ends                   time.Duration // the contexts of some calls end by then; 0: of none
	Closes                 time.Duration // Lockers are closed and replaced about so often; 0: never

	Tokens, OneConnection bool   // of Lockers
	Permits               int    // of semaphores
	Rate, Burst           int    // of limits
	Role                  string // as what workers log in: the superuser, or an application's role, hardened or not
	PoolMode              string // of PgBouncer, if it is between; else empty
	Async                 bool   // the standby may lack commits
	SQL                   bool   // half of the callers are SQL callers that wait in turn
}

// The roles of workers.
const (
	roleOwner    = "owner"
	roleApp      = "application"
	roleHardened = "application, hardened"
)

// newPlan draws a round. A round's kind and first fault are taken in turn, so that few rounds have them all.
func newPlan(cfg runConfig, round int) plan {
	rng := rand.New(rand.NewPCG(cfg.Seed, uint64(round)))
	between := func(least, most time.Duration) time.Duration {
		return (least + time.Duration(rng.Int64N(int64(most-least)+1))).Round(time.Millisecond)
	}
	sometimes := func(d time.Duration) time.Duration {
		if rng.IntN(2) == 0 {
			return 0
		}
		return d
	}
	kinds, faults := shuffled(cfg.Seed, cfg.Kinds), shuffled(cfg.Seed+1, cfg.Faults)
	p := plan{
		Round: round, Seed: rng.Uint64(), Lasts: cfg.Lasts, Broken: cfg.Broken,
		Kind:    kinds[round%len(kinds)],
		Faults:  []string{faults[(round%len(kinds)+round/len(kinds))%len(faults)]},
		Workers: 1 + rng.IntN(4),
		Callers: pick(rng, 1, 2, 4, 8, 16, 32, 64),
		Keys:    pick(rng, 1, 3, 12),
		Hold:    pick(rng, 0, time.Millisecond, 10*time.Millisecond, 50*time.Millisecond, 300*time.Millisecond, 2*time.Second),
		TTL:     between(time.Second, 3*time.Second).Round(100 * time.Millisecond),
		MaxWait: sometimes(between(0, 2*time.Second)),
		Ends:    sometimes(between(time.Millisecond, time.Second)),
		Closes:  sometimes(between(time.Second, 4*time.Second)),
		Tokens:  rng.IntN(3) > 0, OneConnection: rng.IntN(3) == 0, Permits: 1 + rng.IntN(4),
		Rate: pick(rng, 5, 20, 100), Burst: pick(rng, 1, 5, 20),
		Role:  pick(rng, roleOwner, roleApp, roleHardened),
		Async: rng.IntN(2) == 0,
	}
	if second := pick(rng, cfg.Faults...); rng.IntN(2) == 0 && second != p.Faults[0] && second != "none" && !p.has("none") {
		p.Faults = append(p.Faults, second)
	}
	if p.has("pooler") {
		p.PoolMode = pick(rng, "session", "transaction")
		if p.Kind == "advisory" { // a Locker refuses the other mode
			p.PoolMode = "session"
		}
	}
	if p.has("kill") || p.has("freeze") {
		p.Workers = max(p.Workers, 2) // nobody else would notice
	}
	if p.Workers*p.Callers < 4 || p.Kind == "lead" && p.Callers < 3 { // one of which asks leaders to step down
		p.Callers = 4
	}
	switch p.Kind {
	case "set":
		p.Keys = max(p.Keys, 3)
	case "dotx":
		p.Keys = min(p.Keys, 3) // or holders wait for a connection of their pool
	}
	if p.has("timeouts") && p.Role == roleOwner {
		p.Role = roleApp // which has them
	}
	if cfg.CPU > 0 { // to start more takes most of it
		p.Workers, p.Callers = min(p.Workers, 2), min(p.Callers, 8)
	}
	p.SQL = slices.Contains([]string{"lease", "shared", "permit"}, p.Kind) && (rng.IntN(2) == 0 || p.Broken == "refused")
	// Some hundreds of calls a second are enough: more would be a measurement.
	p.Pause = time.Duration(p.Workers*p.Callers) * 5 * time.Millisecond
	return p
}

func (p *plan) has(fault string) bool { return slices.Contains(p.Faults, fault) }

// fenced reports whether the locks have tokens, so that writes can be fenced.
func (p *plan) fenced() bool { return p.Kind != "advisory" || p.Tokens }

func pick[T any](rng *rand.Rand, from ...T) T { return from[rng.IntN(len(from))] }

func shuffled(seed uint64, from []string) []string {
	from = slices.Clone(from)
	rand.New(rand.NewPCG(seed, 0)).Shuffle(len(from), func(i, j int) { from[i], from[j] = from[j], from[i] })
	return from
}
