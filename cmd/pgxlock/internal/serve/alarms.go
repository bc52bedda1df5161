package serve

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/doctor"
)

// examineEvery is how often the doctor is asked: it makes two connections.
const examineEvery = 5 * time.Minute

// A diagnosis is the errors that the doctor found.
type diagnosis struct {
	at     time.Time
	errors []doctor.Finding
}

// examine asks the doctor. A diagnosis that fails leaves the one before it.
func (s *Server) examine(ctx context.Context) {
	if findings, err := s.cfg.Check(ctx); err == nil {
		s.found.Store(&diagnosis{time.Now(), slices.DeleteFunc(findings, func(f doctor.Finding) bool { return f.Status != doctor.StatusError })})
	}
}

// An alarm is a line above the tables.
type alarm struct {
	What, Text, Advice string
	Link               string // to what it is about on the page
	Mild               bool
}

// alarms are what an operator should look at, whatever the query.
func (now *state) alarms() (all []alarm) {
	if now.found != nil {
		for _, f := range now.found.errors {
			checked := "found " + readable.Duration(now.at.Sub(now.found.at).Round(time.Second)) + " ago by pgxlock doctor"
			all = append(all, alarm{What: "doctor: " + f.Check, Text: f.Detail, Advice: f.Advice + " (" + checked + ")"})
		}
	}
	abandoned := 0
	for i := range now.shot.Expired {
		if h := &now.shot.Expired[i]; h.State == pgxlock.StateAbandoned && h.EvictedBy == "" {
			abandoned++
		}
	}
	if abandoned > 0 {
		all = append(all, alarm{What: "abandoned leases: " + grouped(abandoned), Text: "expired more than an hour ago, and not acquired since", Link: "#expired", Mild: true})
	}
	if n := len(now.runs); n > 0 {
		all = append(all, alarm{What: "stopped runs: " + strconv.Itoa(n), Text: "the last run of the key failed or did not end", Link: "#runs", Mild: true})
	}
	return all
}
