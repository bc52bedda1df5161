package serve

import (
	"bytes"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
)

const (
	// rowsShown is how many rows a table has on one page.
	rowsShown = 100

	// longestText is how many characters of a text are sent.
	longestText = 400

	// longestQuery is how many characters of a search count: each word is looked for in
	// each row.
	longestQuery = 200

	// mostLooks is how often a search looks for a word in the rows of one table: for one word in
	// 50,000 rows, for 40 words in 1,250 rows or more.
	mostLooks = 50_000

	// evictionsShown is how many evictions and losses are shown.
	evictionsShown = 20
)

// A query is what a viewer looks for.
type query struct {
	Text, Kind string
	words      [][]byte
	pages      map[string]int // of the tables, from 0
}

// parseQuery reads a query; what it does not understand means everything.
func parseQuery(r *http.Request) query {
	values := r.URL.Query()
	q := query{Text: oneline.Cut(values.Get("q"), longestQuery, ""), Kind: values.Get("kind"), pages: map[string]int{}}
	if q.Kind != "lease" && q.Kind != "advisory" {
		q.Kind = ""
	}
	words := strings.Fields(strings.ToLower(q.Text))
	slices.Sort(words)
	for _, word := range slices.Compact(words) {
		q.words = append(q.words, []byte(word))
	}
	for _, table := range []string{"holders", "waiters", "expired"} {
		if n, err := strconv.Atoi(values.Get(table)); err == nil && n > 0 {
			q.pages[table] = n
		}
	}
	return q
}

// link is the address of the page for a query, with another page of a table.
func (q query) link(table string, page int) string {
	values := url.Values{}
	if q.Text != "" {
		values.Set("q", q.Text)
	}
	if q.Kind != "" {
		values.Set("kind", q.Kind)
	}
	for name, n := range q.pages {
		if name != table {
			values.Set(name, strconv.Itoa(n))
		}
	}
	if page > 0 {
		values.Set(table, strconv.Itoa(page))
	}
	return "/?" + values.Encode()
}

// A searcher looks for the words of a query, as often as it may.
type searcher struct {
	query
	looks int
	text  []byte // of the row, kept for the next one
}

// matches reports whether each word is in one of the texts.
func (s *searcher) matches(texts ...string) bool {
	if len(s.words) == 0 {
		return true
	}
	s.text = s.text[:0]
	ascii := true
	for _, text := range texts {
		for i := range len(text) {
			c := text[i]
			if 'A' <= c && c <= 'Z' {
				c += 'a' - 'A'
			}
			ascii = ascii && c < utf8.RuneSelf
			s.text = append(s.text, c)
		}
		s.text = append(s.text, '\n') // which no word contains
	}
	text := s.text
	if !ascii {
		text = bytes.ToLower(text)
	}
	for _, word := range s.words {
		s.looks--
		if !bytes.Contains(text, word) {
			return false
		}
	}
	return true
}

// search returns the rows of a kind that match, and in how many more it did not look.
func search[Row any](q query, all []*Row, kind func(*Row) pgxlock.Kind, matches func(*searcher, *Row) bool) (some []*Row, left int) {
	if q.Kind == "" && len(q.words) == 0 {
		return all, 0
	}
	s := &searcher{query: q, looks: mostLooks}
	for i, row := range all {
		if s.looks <= 0 {
			return some, len(all) - i
		}
		if (q.Kind == "" || q.Kind == kind(row).String()) && matches(s, row) {
			some = append(some, row)
		}
	}
	return some, 0
}

// A page is what the template shows.
type page struct {
	Database          string
	At, Cannot, Stale string
	Query             query
	Alarms            []alarm
	Plots             []plot
	Graph             *drawing
	Waiters           table[waiterRow]
	Holders, Expired  table[holderRow]
	Runs              []runRow
	Evictions         []evictionRow
	Losses            []lossRow
	Server            string
	Missing           []string
	Every             string
	Session           bool
	Evict             bool
	Nobody            bool // there is nothing at all
	Partly            bool // there are more leases than were read
}

// A table is a part of the rows that pass the query.
type table[Row any] struct {
	Name           string
	Rows           []Row
	All, From, To  int // how many pass, and which of them are shown, from 1
	Before, Behind string
	left           int // in how many more rows the words were not looked for
}

// cut returns the rows of a page.
func cut[From, Row any](q query, name string, all []From, left int, row func(From) Row) table[Row] {
	last := max(0, (len(all)-1)/rowsShown)
	n := min(q.pages[name], last)
	from, to := n*rowsShown, min(len(all), (n+1)*rowsShown)
	t := table[Row]{Name: name, All: len(all), From: from + 1, To: to, left: left}
	for _, one := range all[from:to] {
		t.Rows = append(t.Rows, row(one))
	}
	if n > 0 {
		t.Before = q.link(name, n-1)
	}
	if n < last {
		t.Behind = q.link(name, n+1)
	}
	return t
}

// Hidden says how many rows are not shown.
func (t table[Row]) Hidden() string {
	if hidden := t.All - len(t.Rows); hidden > 0 {
		return grouped(hidden)
	}
	return ""
}

// Left says in how many more rows the words were not looked for.
func (t table[Row]) Left() string {
	if t.left > 0 {
		return grouped(t.left)
	}
	return ""
}

// Has reports whether a field is known of any row that is shown: a column that is empty takes
// room from others.
func (t table[Row]) Has(field string) bool {
	return slices.ContainsFunc(t.Rows, func(row Row) bool { return !reflect.ValueOf(row).FieldByName(field).IsZero() })
}

// Count says how many rows there are.
func (t table[Row]) Count() string { return grouped(t.All) }

type holderRow struct {
	Key, Kind, Mode, State, Holder, Metadata, Token, PID, Client, Age, Remaining, Full string
	Bar                                                                                int // percent
	Low, Late                                                                          bool
	Waiting                                                                            string
	Note, Link                                                                         string
}

type waiterRow struct {
	Key, Kind, Mode, Waiter, PID, Age, For string
	Behind                                 int
	Woken, Deadlock                        bool
}

type runRow struct{ Key, Slot, State, Holder, Ago, At, Error string }

type evictionRow struct{ Key, Kind, Holder, Ago, At, By, Reason string }

type lossRow struct{ Key, Holder, Token, Held, Ago, At, Next, Metadata string }

// text is a text of others for the page.
func text(s string) string {
	return oneline.Text(oneline.Cut(s, longestText, "…"))
}

// ends are the parts of a name: where it is too long for its column the first one is cut, because many
// names differ at their end.
type ends struct{ Begin, End string }

// endLength is how many characters of a name are always shown.
const endLength = 14

func endsOf(name string) ends {
	runes := []rune(name)
	at := max(0, len(runes)-endLength)
	if at < endLength {
		at = len(runes)
	}
	return ends{string(runes[:at]), string(runes[at:])}
}

// title is a key as the page shows it: of pgxlock's own locks what they are.
func title(key, label string, internal bool) string {
	if internal {
		return "(" + text(label) + ")"
	}
	return text(key)
}

func mode(m pgxlock.Mode) string {
	if m == pgxlock.Shared {
		return "shared"
	}
	return ""
}

// view is what a viewer sees of a state.
func (s *Server) view(now *state, q query) page {
	p := page{
		Database: text(s.cfg.Database), Query: q, Cannot: now.cannot, Alarms: now.alarms(), Plots: now.plots(), Every: s.cfg.Every.String(),
		Evict: s.cfg.AllowEvict, Partly: now.partly(),
		Nobody: now.cannot == "" && now.shot.Unread == (monitor.Unread{}) && len(now.shot.Holders)+len(now.shot.Waiters)+len(now.shot.Expired) == 0,
	}
	if now.cannot != "" && !now.shot.At.IsZero() {
		p.Stale = readable.Duration(time.Since(now.readAt()).Round(time.Second))
	}
	at := now.shot.At
	if !at.IsZero() {
		p.At = at.UTC().Format("15:04:05") + " UTC"
	}
	forest := now.graph()
	p.Graph = forest.draw(at, q)

	waiters, left := search(q, forest.queue, func(w *monitor.Waiter) pgxlock.Kind { return w.Kind }, func(s *searcher, w *monitor.Waiter) bool {
		holders := forest.inTheWay(w)
		return s.matches(append([]string{w.Key, w.Owner, w.Label, readable.Number(w.PID)}, holders[:min(rowsShown, len(holders))]...)...)
	})
	p.Waiters = cut(q, "waiters", waiters, left, func(w *monitor.Waiter) waiterRow {
		row := waiterRow{
			Key: title(w.Key, w.Label, w.Internal), Kind: w.Kind.String(), Waiter: text(w.Owner), PID: readable.Number(w.PID), Age: readable.Age(at, w.Since),
			Behind: w.Behind, Woken: w.Woken, Deadlock: forest.deadlocked(w),
		}
		if w.PID != 0 {
			row.Mode = mode(w.Mode)
		}
		holders := forest.inTheWay(w)
		row.For = text(strings.Join(holders[:min(3, len(holders))], ", "))
		if len(holders) > 3 {
			row.For += " and " + grouped(len(holders)-3) + " more"
		}
		return row
	})

	holders := func(name string, all []*pgxlock.Holder) table[holderRow] {
		some, left := search(q, all, func(h *pgxlock.Holder) pgxlock.Kind { return h.Kind }, func(s *searcher, h *pgxlock.Holder) bool {
			return s.matches(h.Key, h.ID, h.Metadata, h.Application, h.Role, h.Client, h.Label, string(h.State), readable.Number(h.Token), readable.Number(h.PID), h.EvictedBy)
		})
		return cut(q, name, some, left, func(h *pgxlock.Holder) holderRow { return s.holder(now, forest, h) })
	}
	p.Holders, p.Expired = holders("holders", forest.held), holders("expired", forest.expired)

	found := &searcher{query: q} // there are at most 1,000 evictions, 100 losses and 100 runs
	for _, r := range now.runs {
		state := string(r.State)
		if r.State == once.StateRunning {
			state = "not ended"
		}
		if q.Kind == "" && found.matches(r.Key, r.Holder, state, r.Error) { // a run is no lock of any kind
			p.Runs = append(p.Runs, runRow{text(r.Key), stamp(r.Slot), state, text(r.Holder), readable.Age(at, r.Started), stamp(r.Started), text(r.Error)})
		}
	}
	ofKind := func(kind pgxlock.Kind) bool { return q.Kind == "" || q.Kind == kind.String() }
	for _, e := range now.evictions {
		if len(p.Evictions) < evictionsShown && ofKind(e.Kind) && found.matches(e.Key, e.Holder, e.By, e.Reason) {
			p.Evictions = append(p.Evictions, evictionRow{title(e.Key, "", false), e.Kind.String(), text(e.Holder), readable.Age(at, e.At), stamp(e.At), text(e.By), text(e.Reason)})
		}
	}
	for _, l := range now.losses {
		if h := l.Holder; len(p.Losses) < evictionsShown && ofKind(h.Kind) && found.matches(h.Key, h.ID, h.Metadata, readable.Number(h.Token), l.Next) {
			p.Losses = append(p.Losses, lossRow{title(h.Key, h.Label, h.Internal), text(h.ID), readable.Number(h.Token), readable.Age(h.Expires, h.Since), readable.Age(at, h.Expires), stamp(h.Expires), text(l.Next), text(h.Metadata)})
		}
	}
	for _, missing := range now.shot.Missing {
		p.Missing = append(p.Missing, text(missing))
	}
	p.Server = load(at, now.shot.Load)
	return p
}

func stamp(at time.Time) string { return at.UTC().Format(time.DateTime) + " UTC" }

// readAt is when the last shot was read that could be.
func (now *state) readAt() time.Time {
	if len(now.history) == 0 {
		return now.at
	}
	return now.history[len(now.history)-1].at
}

func (s *Server) holder(now *state, forest *forest, h *pgxlock.Holder) holderRow {
	at := now.shot.At
	until := at
	row := holderRow{
		Key: title(h.Key, h.Label, h.Internal), Kind: h.Kind.String(), Mode: mode(h.Mode), State: string(h.State), Holder: text(h.ID),
		Metadata: text(h.Metadata), Token: readable.Number(h.Token), PID: readable.Number(h.PID), Waiting: readable.Number(forest.waits.Count(h)),
	}
	row.Client = text(strings.Join(slices.DeleteFunc([]string{h.Role, h.Client}, func(s string) bool { return s == "" }), " at "))
	if !h.Expires.IsZero() {
		remaining := h.Expires.Sub(at)
		row.Remaining = readable.Duration(remaining.Round(100 * time.Millisecond))
		if h.State == pgxlock.StateLive {
			ttl := now.ttl(h)
			row.Full = readable.Duration(ttl)
			row.Bar = int(max(0, min(100, 100*remaining/ttl)))
			row.Late = h.Late
			row.Low = row.Late || row.Bar < 34
		} else {
			until = h.Expires
			row.Remaining = readable.Duration(-remaining.Round(time.Second))
		}
	}
	row.Age = readable.Age(until, h.Since)
	switch {
	case h.EvictedBy != "" && h.State == pgxlock.StateLive:
		row.Note = "being evicted by " + text(h.EvictedBy) + ": " + text(h.EvictionReason)
	case h.EvictedBy != "":
		row.Note = "evicted by " + text(h.EvictedBy) + ": " + text(h.EvictionReason)
	case h.Suspect:
		row.Note = "began later than the server's clock shows: the clock was set back"
	case h.Label != "" && !h.Internal:
		row.Note = text(h.Label)
	}
	if s.cfg.AllowEvict && !h.Internal && h.State == pgxlock.StateLive && (h.Kind == pgxlock.KindLease || h.PID != 0) {
		row.Link = "/evict?hold=" + holding(*h)
	}
	return row
}

// load says how much of the server locks use up.
func load(at time.Time, l monitor.Load) string {
	if l.Room == 0 {
		return ""
	}
	text := "lock table " + grouped(int(l.Locks)) + " of " + grouped(int(l.Room)) + ", notifications " + strconv.Itoa(int(100*l.Notifications)) + "%"
	if l.OldestPID != 0 {
		text += ", oldest snapshot " + readable.Age(at, l.OldestSince) + " (process " + readable.Number(l.OldestPID) + ")"
	}
	return text
}

// page shows everything.
func (s *Server) page(w http.ResponseWriter, r *http.Request) {
	now, err := s.feed.get(r.Context())
	if err != nil {
		return // the viewer has gone
	}
	p := s.view(now, parseQuery(r))
	p.Session = s.session(r) != ""
	render(w, http.StatusOK, "page.html", p)
}

// render writes a page whole, or not at all.
func render(w http.ResponseWriter, code int, name string, data any) {
	var html bytes.Buffer
	if err := pages.ExecuteTemplate(&html, name, data); err != nil {
		answer(w, http.StatusInternalServerError, "the page cannot be made: "+err.Error())
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write(html.Bytes()) // the viewer may have gone
}
