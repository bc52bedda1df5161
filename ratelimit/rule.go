package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// A rule is a limit in the whole nanoseconds that it is counted in.
type rule struct {
	limit Limit
	burst int
	step  time.Duration // one event
}

// The finest limit that whole nanoseconds tell well enough (to half a thousandth), and
// the longest time that is counted.
const (
	maxLimit     = 1_000_000
	maxLimitTime = 100 * 360 * 24 * time.Hour // PostgreSQL counts 360 days to a year
)

func newRule(limit Limit, burst int) (rule, error) {
	r := rule{limit: limit, burst: burst}
	switch {
	case math.IsInf(float64(limit), 1):
		return r, errors.New("the limit is infinite; to allow everything, use no Limiter")
	case !(limit > 0): // nor NaN
		return r, fmt.Errorf("the limit is %v, it must be more than 0 events per second; use Every for one event per interval", float64(limit))
	case limit > maxLimit:
		return r, fmt.Errorf("the limit is %v, it must be at most %d events per second; limit batches of them instead", float64(limit), maxLimit)
	case burst < 1 || burst > math.MaxInt32:
		return r, fmt.Errorf("the burst is %d, it must be between 1 and %d: it is how many events may happen at once", burst, math.MaxInt32)
	}
	step := math.RoundToEven(float64(time.Second) / float64(limit))
	if step > float64(maxLimitTime)/float64(burst) {
		return r, fmt.Errorf("%d events at %v per second take longer than 100 years; lower the burst or raise the limit", burst, float64(limit))
	}
	r.step = time.Duration(step)
	return r, nil
}

// check says what is wrong with a number of events.
func (r rule) check(n int) error {
	switch {
	case n < 1:
		return fmt.Errorf("n is %d, it must be at least 1", n)
	case n > r.burst:
		return fmt.Errorf("n is %d, more than the burst of %d: so many events can never happen at once", n, r.burst)
	}
	return nil
}

// take judges n events of a key whose time is tat, and returns after which delay they
// may happen and what its time is with them.
func (r rule) take(tat, now int64, n int) (delay time.Duration, after int64) {
	tat = max(tat, now)
	cost := time.Duration(n) * r.step
	ahead := time.Duration(tat - now)
	return max(ahead-(time.Duration(r.burst)*r.step-cost), 0), tat + int64(cost)
}

// refund returns the key's time without n events that moved it to was, if they are
// the last: it is then where it would be without them. Those behind them, if any, keep
// the promised times, and what may happen at the same time as they cannot be told from
// the key's time alone: nothing is given back then. A bucket that is full gets nothing.
func (r rule) refund(tat, now int64, n int, was int64) int64 {
	if tat != was || was <= now {
		return tat
	}
	return max(was-int64(n)*int64(r.step), now)
}
