package main

import (
	"math/rand/v2"
	"sync/atomic"
)

// A bus delivers messages to workers as message buses do: each of them at least
// once, to whichever worker asks, and again until one acknowledges it.
type bus struct {
	orders chan int
	left   atomic.Int64 // not acknowledged
}

// newBus has a message for each order from 0 to n-1, and as many copies of it, in
// any sequence.
func newBus(n, copies int) *bus {
	b := &bus{orders: make(chan int, n*copies)}
	b.left.Store(int64(n * copies))
	for _, i := range rand.Perm(n * copies) {
		b.orders <- i % n
	}
	if n*copies == 0 {
		close(b.orders)
	}
	return b
}

// ack says that the message is done with. After the last one orders is closed.
func (b *bus) ack() {
	if b.left.Add(-1) == 0 {
		close(b.orders)
	}
}

// nack gives a message back, to be delivered again. A bus for work that takes
// longer would wait a little.
func (b *bus) nack(order int) { b.orders <- order }
