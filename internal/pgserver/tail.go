// A tail keeps the end of a server's log.

package pgserver

import (
	"bytes"
	"io"
	"sync"
)

const tailSize = 8 << 10

// tail keeps the last bytes written to it, and passes all of them on to a
// second writer if there is one. Lines about connections are only counted.
type tail struct {
	mu          sync.Mutex
	buf         []byte
	also        io.Writer
	connections int
}

// Write never fails: the server's log must be read to the end even if the
// second writer is broken, or the server would stop at a full pipe.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for line := range bytes.Lines(p) {
		if bytes.Contains(line, []byte("LOG:  connection ")) {
			if bytes.Contains(line, []byte("LOG:  connection received: ")) {
				t.connections++
			}
			continue
		}
		t.keep(line)
	}
	return len(p), nil
}

func (t *tail) keep(p []byte) {
	t.buf = append(t.buf, p...)
	if extra := len(t.buf) - tailSize; extra > 0 {
		t.buf = append(t.buf[:0], t.buf[extra:]...)
	}
	if t.also != nil {
		_, _ = t.also.Write(p)
	}
}

// received returns how many connections there were, where the server logs them.
func (t *tail) received() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.connections
}

// String returns the last lines. The first is left out if it may be cut.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := t.buf
	if len(lines) == tailSize {
		if _, rest, ok := bytes.Cut(lines, []byte("\n")); ok {
			lines = rest
		}
	}
	return string(lines)
}
