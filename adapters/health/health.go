// Package health answers requests of load balancers and supervisors over HTTP, such as whether
// this process is the leader. It links net/http, which package pgxlock does not.
package health

import (
	"net/http"

	"github.com/pgxlock/pgxlock"
)

// Leader returns a handler that answers 200 while this process leads for the key, by
// [pgxlock.Locker.Leads], and 503 otherwise: before it leads, from the moment in which
// leadership is lost or the leader is asked to step down, and after Lead has returned. It
// answers from memory: the server need not be reachable, and requests cost it nothing.
//
//	http.Handle("/leader", health.Leader(locks, "scheduler"))
//
// An answer may be out of date when it arrives. It says where requests should go, and does not
// protect what they write: that takes [pgxlock.Lock.Fence].
func Leader(locks *pgxlock.Locker, key string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		code, text := http.StatusServiceUnavailable, "not the leader\n"
		if locks.Leads(key) {
			code, text = http.StatusOK, "leader\n"
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(code)
		_, _ = w.Write([]byte(text)) // a client that has gone needs no answer
	})
}
