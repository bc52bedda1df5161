// Random steps, for tests that compare something with a model of it.

package pgtest

import (
	"flag"
	"strconv"
	"testing"

	"pgregory.net/rapid"
)

// Some hundreds of steps, or tens of thousands in a run of make soak; -rapid.checks and
// -rapid.steps change it, -rapid.seed repeats one. What fails is shown, and not kept.
func init() {
	checks, steps := 10, 40
	if part := soakPart(); part > 0 {
		checks, steps = 10+int(70*part), 300
	}
	for name, value := range map[string]string{"rapid.checks": strconv.Itoa(checks), "rapid.steps": strconv.Itoa(steps), "rapid.nofailfile": "true"} {
		if err := flag.Set(name, value); err != nil { // before the command line is read
			panic(err)
		}
	}
}

// Model plays many rounds of random steps. begin makes what a round needs, something and
// its model, and returns what can be done to them: each action draws what it needs, does
// it to both and compares. The action "" compares all there is, after each of the
// others. Of a round that fails, rapid finds a short one that fails as well, so that a
// round must not depend on those before it.
func Model(t *testing.T, begin func(*rapid.T) map[string]func(*rapid.T)) {
	t.Helper()
	Soak(t, 0, 0) // its name must be known to make soak
	steps := 0
	rapid.Check(t, func(r *rapid.T) {
		actions := begin(r)
		for name, action := range actions {
			if name != "" {
				actions[name] = func(r *rapid.T) {
					action(r)
					steps++
				}
			}
		}
		r.Repeat(actions)
	})
	t.Logf("%d steps", steps)
}
