// Package observe calls the functions Observe of configs, for the packages that have one,
// names locks in log records, and makes labels of metrics from keys, for the adapters.
package observe

import (
	"context"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
)

var calls atomic.Uint64

// Call returns the number of a new call: events of all packages are numbered together.
func Call() uint64 { return calls.Add(1) }

// Tell calls to with an event. A panic in it is logged, and the call that the event is
// about goes on.
func Tell[E slog.LogValuer](ctx context.Context, log *slog.Logger, to func(context.Context, E), event E) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("pgxlock: Observe panicked", "event", event, "panic", p, "stack", string(debug.Stack()))
		}
	}()
	to(ctx, event)
}
