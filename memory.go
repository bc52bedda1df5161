package pgxlock

import (
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/memory"
)

// NewMemoryLocker returns a Locker that keeps its locks in the memory of this process. They
// exclude only other calls of the same Locker. Use it in unit tests, also in
// testing/synctest bubbles, and in programs that run alone. It behaves as the other kinds
// do, with three differences: its locks are never lost and have no deadline, so TTL changes
// nothing; it cannot fence a transaction ([errors.ErrUnsupported]); and of the waits that
// would never end it finds only those of a caller for itself.
func NewMemoryLocker() *Locker {
	began := time.Now()
	l := newLocker(KindMemory, func() time.Duration { return time.Since(began) }, clock.DefaultBackoff, slog.New(slog.DiscardHandler))
	l.use(memory.New(l.holds.Clock, l.queue))
	return l
}
