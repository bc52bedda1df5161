package hold

import (
	"context"
	"iter"
)

// Context returns a child of parent that ends when the hold does, with the cause that the
// hold reports. Its Err reads the clock.
func (h *Hold) Context(parent context.Context) (context.Context, context.CancelFunc) {
	inner, cancel := context.WithCancelCause(parent)
	c := &holdContext{Context: inner, hold: h, cancel: cancel}
	h.mu.Lock()
	defer h.unlock()
	if h.contexts == nil {
		h.contexts = make(map[*holdContext]struct{})
	}
	h.contexts[c] = struct{}{}
	if err := h.checkLocked(h.group.Clock()); err != nil {
		h.cancelContextsLocked(err)
	} else if h.closing != nil {
		h.cancelContextsLocked(h.closing)
	}
	context.AfterFunc(inner, func() {
		h.mu.Lock()
		defer h.unlock()
		delete(h.contexts, c)
	})
	return c, func() { cancel(context.Canceled) }
}

// EndContexts ends the contexts of a lock that is still held.
func (h *Hold) EndContexts(why error) {
	h.mu.Lock()
	defer h.unlock()
	h.closing = why
	h.cancelContextsLocked(why)
}

func (h *Hold) cancelContextsLocked(why error) {
	for c := range h.contexts {
		h.ending = append(h.ending, func() { c.cancel(why) })
	}
	clear(h.contexts)
}

// A holdContext is a context whose Err checks the hold.
type holdContext struct {
	context.Context // with a cancel of its own
	hold            *Hold
	cancel          context.CancelCauseFunc
}

func (c *holdContext) Err() error {
	if err := c.hold.Err(); err != nil {
		c.cancel(err) // the hold may have noticed just now, and be about to end c
	}
	return c.Context.Err()
}

// heldKey is the context key under which a holdContext returns itself.
type heldKey struct{}

func (c *holdContext) Value(key any) any {
	if key == (heldKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// HeldBy yields the holds that ctx comes from, the last one first.
func HeldBy(ctx context.Context) iter.Seq[*Hold] {
	return func(yield func(*Hold) bool) {
		for {
			c, ok := ctx.Value(heldKey{}).(*holdContext)
			if !ok || !yield(c.hold) {
				return
			}
			ctx = c.Context
		}
	}
}
