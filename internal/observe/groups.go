package observe

import "sync"

// Other is the group of all keys beyond the most.
const Other = "other"

// DefaultGroups is how many groups there are at most, unless a config says more.
const DefaultGroups = 100

// Groups makes the values of a label from keys, and never more than a bounded number.
type Groups struct {
	of   func(key string) string // nil: all keys are in one group without a name
	most int

	mu    sync.Mutex
	known map[string]bool
}

// NewGroups returns Groups that of names; most is how many names there may be besides
// [Other], 0 for the default.
func NewGroups(of func(key string) string, most int) *Groups {
	if most <= 0 {
		most = DefaultGroups
	}
	return &Groups{of: of, most: most, known: make(map[string]bool)}
}

// Of returns the group of a key.
func (g *Groups) Of(key string) string {
	if g.of == nil {
		return ""
	}
	name := g.of(key)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.known[name] {
		if len(g.known) >= g.most {
			return Other
		}
		g.known[name] = true
	}
	return name
}

// Seconds are the bounds of the buckets of waits and holds: locks wait for milliseconds or
// for minutes.
var Seconds = []float64{.001, .003, .01, .03, .1, .3, 1, 3, 10, 30, 60, 300, 1800}
