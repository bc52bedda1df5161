package serve

import (
	"bytes"
	"fmt"
	"net/http"
	"sync"
	"time"
)

const (
	// writeTimeout is how long a viewer may take to receive an event.
	writeTimeout = 10 * time.Second

	// retry is how long, in milliseconds, a browser waits before it asks again.
	retry = 2000
)

// events sends the part of the page that changes, now and with each state, as the viewer's
// search has it. An event without a name holds HTML.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	leave, err := s.feed.join()
	if err != nil {
		w.Header().Set("Retry-After", "30")
		answer(w, http.StatusServiceUnavailable, "too many viewers; the page can be reloaded")
		return
	}
	defer leave()
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // for nginx
	if _, err := fmt.Fprintf(w, "retry: %d\n\n", retry); err != nil || control.Flush() != nil {
		return
	}
	if _, err := s.feed.get(r.Context()); err != nil { // the last state may be of yesterday
		return
	}
	asked := parseQuery(r)
	var shown *state
	for {
		last, changed := s.feed.next()
		if last != nil && last != shown {
			if err := control.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
				return
			}
			if _, err := w.Write(s.live(last, asked)); err != nil || control.Flush() != nil {
				return
			}
			shown = last
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
		if !s.allows(r) { // the session has ended
			return
		}
	}
}

// live is a state as an event, made once for all viewers who search for the same.
func (s *Server) live(now *state, q query) []byte {
	made, _ := now.live.LoadOrStore(q.link("", 0), sync.OnceValue(func() []byte {
		var html bytes.Buffer
		if err := pages.ExecuteTemplate(&html, "live", s.view(now, q)); err != nil {
			return nil // what the template was sent it always can show
		}
		return event(html.Bytes())
	}))
	return made.(func() []byte)()
}

// event is a text as an event: each line behind a word.
func event(text []byte) []byte {
	lines := bytes.ReplaceAll(bytes.TrimSpace(text), []byte("\r"), nil)
	return append(append([]byte("data: "), bytes.ReplaceAll(lines, []byte("\n"), []byte("\ndata: "))...), "\n\n"...)
}
