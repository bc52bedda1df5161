package serve

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/oneline"
)

const (
	// guessCost is how long the answer to a wrong token takes.
	guessCost = time.Second

	// mostGuesses is how many such answers are kept waiting, each with a goroutine and a socket.
	mostGuesses = 16

	// longestFrom is how many bytes from returns at most.
	longestFrom = 280
)

// guesses are the requests with a wrong token. A right token never waits for them: that no flood
// finds it is due to its length, and the pause keeps a flood from taking the processor and the log.
type guesses struct {
	log func(text string)

	mu       sync.Mutex
	waiting  int
	unlogged int // were refused at once since the log said so last
}

// refuse returns the code to answer a wrong token with, after a second and a line in the log. While too
// many wait it returns at once, and the log has the number of them.
func (g *guesses) refuse(r *http.Request) (code int) {
	g.mu.Lock()
	if g.waiting >= mostGuesses {
		g.unlogged++
		g.mu.Unlock()
		return http.StatusTooManyRequests
	}
	g.waiting++
	g.mu.Unlock()

	g.log("wrong token from " + from(r))
	pause := time.NewTimer(guessCost)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-r.Context().Done(): // the client has gone, or the server is about to end
	}
	g.mu.Lock()
	unlogged := g.unlogged
	g.waiting, g.unlogged = g.waiting-1, 0
	g.mu.Unlock()
	if unlogged > 0 {
		g.log(fmt.Sprintf("%d more wrong tokens, refused at once", unlogged))
	}
	return http.StatusUnauthorized
}

// from says where a request comes from, in ASCII without control characters: its address, and what
// the nearest proxy says of it, which where there is none is what the client says.
func from(r *http.Request) string {
	text, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		text = "the socket" // a client of a Unix socket has no address
	}
	last := func(name string) string {
		if all := r.Header.Values(name); len(all) > 0 {
			return all[len(all)-1]
		}
		return ""
	}
	forwarded := last("X-Forwarded-For")
	forwarded = strings.TrimSpace(forwarded[strings.LastIndexByte(forwarded, ',')+1:]) // each proxy appends whom it saw
	for _, header := range [][2]string{{"X-Forwarded-For", forwarded}, {"X-Forwarded-User", last("X-Forwarded-User")}} {
		if header[1] != "" {
			text += ", " + header[0] + " " + strconv.QuoteToASCII(oneline.Cut(header[1], 80, "..."))
		}
	}
	return oneline.Cut(text, longestFrom-len("..."), "...")
}
