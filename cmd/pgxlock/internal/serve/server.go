// Package serve is the page of pgxlock serve: who holds locks and who waits, for people who
// have a browser. One embedded page is rendered on the server, works without JavaScript,
// and follows the database by server-sent events where there is JavaScript.
//
//	server.go   the handler: its routes, and the headers of each answer
//	access.go   who may ask: host names, the token, cookies
//	guesses.go  wrong tokens, and where requests come from
//	feed.go     one snapshot for all viewers, and one twice a minute while nobody looks
//	page.go     what the page shows of a snapshot: search, rows, paging
//	graph.go    who is in whose way, as a drawing in layers
//	history.go  the last hour, as plots
//	losses.go   leases that expired while they were held
//	alarms.go   what the doctor found, abandoned leases, and stopped runs
//	events.go   the page as it changes
//	evict.go    an operator takes a lock away
//
// The package is below the command and not below internal/ of the module, because it shows
// a monitor.Snapshot: what the root package is built on may not import it.
package serve

import (
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"html/template"
	"io/fs"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
)

// A Config says what to serve, and to whom.
type Config struct {
	// Database says which database the page is about.
	Database string

	// Locks is what the page shows. It should read MostLeases.
	Locks *monitor.Monitor

	// All is what /api/snapshot answers if Locks does not read all leases.
	All *monitor.Monitor

	// Evictions returns recent evictions, the latest first. Nil: the page does not show them.
	Evictions func(context.Context) ([]Eviction, error)

	// Runs returns the runs that stopped, the latest first. Nil: the page does not show them.
	Runs func(context.Context) ([]Run, error)

	// Check returns what pgxlock doctor finds. Nil: the page does not show it.
	Check func(context.Context) ([]doctor.Finding, error)

	// Ready returns an error unless the database can be asked.
	Ready func(context.Context) error

	// Describe makes one line of an error, with what to do about it.
	Describe func(error) string

	// Advise says in the words of a command line what to do about something that is missing. Nil: nothing is changed.
	Advise func(string) string

	// JSON is what /api/snapshot answers. The evictions and the runs are nil if they could not
	// be read.
	JSON func(monitor.Snapshot, []Eviction, []Run, []Loss) any

	// Metrics answers /metrics. Nil: there is none.
	Metrics http.Handler

	// Token is what viewers must know. Empty: nobody is asked for one.
	Token string

	// Log writes a line that says what an operator should know: wrong tokens, that the database cannot be read,
	// or can be again, and what the first snapshot lacks. It is called by several goroutines at once. Nil: nothing is logged.
	Log func(text string)

	// AllowEvict lets viewers evict holders. It needs a Token.
	AllowEvict bool

	// Remote: the server listens on more than loopback addresses.
	Remote bool

	// Hosts are the host names by which browsers may ask, beside localhost and addresses.
	Hosts []string

	// Every is the time between two snapshots while somebody looks, at least a second.
	Every time.Duration
}

// MostLeases is how many leases the page reads: with them a look takes three times as long as
// without, and paging and search still find most databases whole.
const MostLeases = 2_000

// An Eviction is one that was recorded.
type Eviction struct {
	Key    string
	Kind   pgxlock.Kind
	Holder string
	At     time.Time
	By     string
	Reason string
}

// A Run is one of package once that failed or did not end, and is not started again before
// the next period.
type Run struct {
	Key     string
	Slot    time.Time // the beginning of its period, or its tick
	State   once.State
	Holder  string
	Started time.Time
	Error   string // of one that failed
}

// The assets are compiled into the program.
//
//go:embed assets
var assets embed.FS

var pages = template.Must(template.New("").Funcs(template.FuncMap{"ends": endsOf}).ParseFS(assets, "assets/*.html"))

// A Server serves the page.
type Server struct {
	cfg     Config
	secret  []byte   // of this process: cookies and forms end with it
	left    sync.Map // sessions that were ended before their time
	guesses guesses
	feed    *feed
	all     *feed                     // reads all leases, when a program asks and the page does not have them
	found   atomic.Pointer[diagnosis] // by the doctor, last
	handler http.Handler

	readiness readiness
}

// New returns a Server, which asks the database when somebody looks, or [Server.Record]s.
func New(cfg Config) (*Server, error) {
	switch {
	case cfg.AllowEvict && cfg.Token == "":
		return nil, errors.New("a server that evicts needs a token")
	case cfg.Remote && cfg.Token == "":
		return nil, errors.New("a server that listens on more than loopback needs a token")
	}
	cfg.Every = max(cfg.Every, minAge)
	if cfg.Log == nil {
		cfg.Log = func(string) {}
	}
	if cfg.Advise == nil {
		cfg.Advise = func(text string) string { return text }
	}
	s := &Server{cfg: cfg, secret: make([]byte, 32)}
	if _, err := rand.Read(s.secret); err != nil {
		return nil, err
	}
	s.guesses.log = cfg.Log
	s.feed = s.newFeed(cfg.Locks)
	s.all = s.newFeed(cfg.All)

	files, err := fs.Sub(assets, "assets")
	if err != nil {
		return nil, err
	}
	open, private := http.NewServeMux(), http.NewServeMux()
	open.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, "ok") })
	open.HandleFunc("GET /readyz", s.ready)
	static := http.FileServerFS(files)
	for _, name := range []string{"/style.css", "/page.js", "/icon.svg"} {
		open.Handle("GET "+name, static)
	}
	open.HandleFunc("GET /login", s.login)
	open.HandleFunc("POST /login", s.enter)
	open.HandleFunc("POST /logout", s.leave)
	open.Handle("/", s.authorized(private))
	private.HandleFunc("GET /{$}", s.page)
	private.HandleFunc("GET /events", s.events)
	private.HandleFunc("GET /api/snapshot", s.snapshot)
	if cfg.AllowEvict {
		private.HandleFunc("GET /evict", s.askEvict)
		private.HandleFunc("POST /evict", s.evict)
	}
	if cfg.Metrics != nil {
		private.Handle("GET /metrics", cfg.Metrics)
	}
	s.handler = s.guarded(http.NewCrossOriginProtection().Handler(open))
	return s, nil
}

// ServeHTTP answers a request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// policy allows what this server serves and nothing else: no inline script or style, no
// frame around the page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"

// guarded sets the headers of each answer, and refuses requests for other hosts.
func (s *Server) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Content-Security-Policy", policy)
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		header.Set("Cross-Origin-Opener-Policy", "same-origin")
		header.Set("Cache-Control", "no-store")
		if !s.knows(r.Host) {
			answer(w, http.StatusMisdirectedRequest, "pgxlock serve does not answer to this host name; --host allows one")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// answer writes one line.
func answer(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(text + "\n")) // the client may have gone
}

// readiness is whether the database could be asked, which is found out at most once a second:
// those who ask need no token.
type readiness struct {
	mu  sync.Mutex // held while the database is asked
	at  time.Time
	err error
}

func (r *readiness) get(ctx context.Context, ask func(context.Context) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.at) >= minAge {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readTimeout) // others want to know, too
		defer cancel()
		r.err = ask(ctx)
		r.at = time.Now()
	}
	return r.err
}

// ready says whether the database can be asked, and no more: it asks for no token.
func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	if err := s.readiness.get(r.Context(), s.cfg.Ready); err != nil {
		answer(w, http.StatusServiceUnavailable, "cannot reach the database")
		return
	}
	answer(w, http.StatusOK, "ok")
}

// snapshot answers with everything as JSON.
func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) {
	now, err := s.feed.get(r.Context())
	if err == nil && now.partly() {
		now, err = s.all.get(r.Context())
	}
	if err != nil {
		return // the client has gone
	}
	code, body := http.StatusOK, any(nil)
	if now.cannot == "" {
		body = s.cfg.JSON(now.shot, now.evictions, now.runs, now.losses)
	} else {
		code, body = http.StatusServiceUnavailable, map[string]string{"error": now.cannot}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = oneline.JSON(w, body, "") // the client may have gone
}
