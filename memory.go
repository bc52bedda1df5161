package pgxlock

import (
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/memory"
)

// NewMemoryLocker returns a Locker that keeps its locks in the memory of this process, for
// tests, also in testing/synctest bubbles, and for programs that run alone. They exclude only
// other calls of the same Locker. It behaves as the other kinds do, with three differences: its
// locks are never lost and have no deadline, so TTL changes nothing; it cannot fence a
// transaction ([errors.ErrUnsupported]); and of the waits that would never end it finds only
// those of a caller for itself. Package locktesting has a Locker whose locks a test can lose.
func NewMemoryLocker() *Locker {
	l := newMemory(clock.DefaultBackoff, slog.New(slog.DiscardHandler))
	l.use(memory.New(l.holds.Clock, l.queue))
	return l
}

// newMemory makes a Locker without a server that still lacks its backend.
func newMemory(backoff func(int) time.Duration, log *slog.Logger) *Locker {
	began := time.Now()
	return newLocker(KindMemory, func() time.Duration { return time.Since(began) }, backoff, log)
}

func init() {
	memory.NewLocker = func(config any, backend func(hold.Host, memory.Lease) hold.Backend) (any, error) {
		cfg, err := config.(*LeaseConfig).withDefaults()
		if err != nil {
			return nil, &Error{Op: "new", Kind: KindMemory, Err: err}
		}
		l := newMemory(cfg.Backoff, cfg.Logger)
		l.observe, l.ttl = cfg.Observe, cfg.TTL
		l.use(backend(l.host(), memory.Lease{Owner: cfg.Owner, TTL: cfg.TTL, Renew: cfg.Renew, Margin: cfg.Margin}))
		return l, nil
	}
}
