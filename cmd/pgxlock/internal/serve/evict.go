package serve

import (
	"context"
	"crypto/hmac"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/monitor"
)

const (
	// mostForm is how many bytes a form may have: names and a reason.
	mostForm = 64 << 10

	// longestReason is how many bytes a viewer's reason has at most: Monitor.Evict takes 900, and
	// where the request came from is put behind it.
	longestReason = 900 - longestFrom - len(" (from )")

	// evictTimeout bounds an eviction: a session is asked for 5 s.
	evictTimeout = 15 * time.Second
)

// A hold is as much of a holder as Monitor.Evict compares.
type hold struct {
	monitor.HoldID
	Mode pgxlock.Mode
	PID  int32
}

// holding names a hold in an address or a form. A browser would change the line breaks and
// the zero bytes of a key there.
func holding(h pgxlock.Holder) string {
	text, err := json.Marshal(hold{monitor.HoldOf(&h), h.Mode, h.PID})
	if err != nil {
		panic("pgxlock: " + err.Error()) // texts and numbers
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

// errForm means that a form names no hold.
var errForm = errors.New("the form does not name a holder")

// holder is the opposite of holding.
func holder(form string) (pgxlock.Holder, error) {
	var h hold
	text, err := base64.RawURLEncoding.DecodeString(form)
	if err == nil {
		err = json.Unmarshal(text, &h)
	}
	if err != nil || h.Key == "" {
		return pgxlock.Holder{}, errForm
	}
	return pgxlock.Holder{Key: h.Key, Raw: h.Raw, Kind: h.Kind, Mode: h.Mode, ID: h.ID, Token: h.Token, PID: h.PID}, nil
}

// An evictPage asks for a reason, or says what came of it.
type evictPage struct {
	Key, Kind, Holder, Token, PID string
	Hold                          string
	CSRF, Reason, Problem, Done   string
	From                          string // recorded with the reason
	Longest                       int
}

func (s *Server) evictPage(r *http.Request, h pgxlock.Holder) evictPage {
	return evictPage{
		Key: title(h.Key, "", false), Kind: h.Kind.String(), Holder: text(h.ID), Token: readable.Number(h.Token), PID: readable.Number(h.PID),
		Hold: holding(h), CSRF: s.sign("csrf", s.session(r)), Longest: longestReason,
		From: from(r),
	}
}

// mayEvict refuses requests that did not come from a form of this session.
func (s *Server) mayEvict(w http.ResponseWriter, r *http.Request) bool {
	session := s.session(r)
	if session == "" {
		answer(w, http.StatusForbidden, "evicting needs a session: log in with the token")
		return false
	}
	if r.Method == http.MethodPost && !hmac.Equal([]byte(r.PostFormValue("csrf")), []byte(s.sign("csrf", session))) {
		answer(w, http.StatusForbidden, "this form is not of your session: open the page again")
		return false
	}
	return true
}

// askEvict asks for a reason.
func (s *Server) askEvict(w http.ResponseWriter, r *http.Request) {
	if !s.mayEvict(w, r) {
		return
	}
	h, err := holder(r.URL.Query().Get("hold"))
	if err != nil {
		answer(w, http.StatusBadRequest, err.Error())
		return
	}
	render(w, http.StatusOK, "evict.html", s.evictPage(r, h))
}

// evict takes a lock away, and says what came of it.
func (s *Server) evict(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, mostForm)
	if err := r.ParseForm(); err != nil {
		answer(w, http.StatusBadRequest, "the form cannot be read")
		return
	}
	if !s.mayEvict(w, r) {
		return
	}
	h, err := holder(r.PostForm.Get("hold"))
	if err != nil {
		answer(w, http.StatusBadRequest, err.Error())
		return
	}
	p := s.evictPage(r, h)
	p.Reason = strings.TrimSpace(r.PostFormValue("reason"))
	if p.Reason == "" || len(p.Reason) > longestReason {
		p.Problem = "A reason is needed, of at most " + strconv.Itoa(longestReason) + " bytes: for the holder, and for the record."
		render(w, http.StatusUnprocessableEntity, "evict.html", p)
		return
	}
	// An operator who closes the page has still evicted.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), evictTimeout)
	defer cancel()
	evicted, err := s.cfg.Locks.Evict(ctx, h, p.Reason+" (from "+p.From+")")
	s.feed.change() // the page to which the operator returns shows it
	switch {
	case errors.Is(err, monitor.ErrStillHeld):
		p.Problem = "The session was asked to release the lock and still holds it: it is no Locker's, cannot listen, or hangs. pgxlock evict --terminate ends it."
		render(w, http.StatusConflict, "evict.html", p)
	case err != nil:
		p.Problem = s.cfg.Describe(err)
		render(w, http.StatusBadGateway, "evict.html", p)
	case !evicted:
		p.Problem = "It no longer holds the lock; nothing was evicted."
		render(w, http.StatusConflict, "evict.html", p)
	default:
		p.Done = "Evicted."
		render(w, http.StatusOK, "evict.html", p)
	}
}
