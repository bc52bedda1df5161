package judge

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

const (
	patience = 5 * time.Second // for one part of a history, and again if it is narrowed
	longest  = 500             // operations of a part: porcupine needs memory by their square, and a picture should show them
)

// A part is a history for porcupine: of one lock, claim or run, and of a long one from a moment on
// at which its state is known.
type part struct {
	name       string
	model      porcupine.Model
	operations []porcupine.Operation
}

// linearizable has porcupine judge whether acquires and ends of each lock, and each claim and run,
// can have happened one after the other, each between its call and its return.
//
// A call that failed did nothing, and one without an answer may have done nothing: then the others
// have to be possible alone, and they are whenever they are possible with it. So locks leave out
// both. A claim that found another needs that one, which may be one without an answer.
func linearizable(r *run, v *Verdict) {
	for _, l := range r.locks {
		for _, p := range l.parts(longest) {
			check(r, v, p, patience)
		}
	}
	for _, p := range firsts(r) {
		check(r, v, p, patience)
	}
}

// check has porcupine judge a part.
func check(r *run, v *Verdict, p part, patience time.Duration) {
	v.Checked += len(p.operations)
	callers := map[string]int{} // each has a line of the picture
	for i, o := range p.operations {
		caller := o.Input.(step).caller
		if _, ok := callers[caller]; !ok {
			callers[caller] = len(callers)
		}
		p.operations[i].ClientId = callers[caller]
	}
	result, info := porcupine.CheckOperationsVerbose(p.model, p.operations, patience)
	if result == porcupine.Unknown {
		result, info = porcupine.CheckOperationsVerbose(p.model, narrow(p.operations), patience)
	}
	switch result {
	case porcupine.Ok:
		return
	case porcupine.Unknown:
		v.Unknown = append(v.Unknown, fmt.Sprintf("%s: no answer in %v", p.name, patience))
		return
	}
	v.violated("%s is not linearizable; picture: %s", p.name, r.draw(p, info))
}

// narrow returns operations that are possible if and only if these are, and that leave porcupine
// less to try. An acquire is as if it happened at its return: the lock is held then, so that nothing
// that conflicts with it happened between. An end is as if it happened as soon as it can.
func narrow(operations []porcupine.Operation) []porcupine.Operation {
	operations = slices.Clone(operations)
	for i := range operations {
		switch o := &operations[i]; o.Input.(step).does {
		case acquires:
			o.Call = o.Return
		case ends:
			o.Return = o.Call
		}
	}
	return operations
}

// draw leaves the picture of a part, with all faults, and returns its name, or why there is none.
func (r *run) draw(p part, info porcupine.LinearizationInfo) string {
	if r.pictures == "" {
		return "none"
	}
	for _, f := range r.faults {
		info.AddAnnotations([]porcupine.Annotation{{Tag: "faults", Start: f.Mono, End: f.ended, Description: string(f.Fault), Details: f.Target}})
	}
	name := strings.Map(func(c rune) rune {
		if strings.ContainsRune(` "/\:`, c) {
			return '-'
		}
		return c
	}, p.name)
	picture := filepath.Join(r.pictures, name+".html")
	if err := porcupine.VisualizePath(p.model, info, picture); err != nil {
		return err.Error()
	}
	return picture
}

// parts returns what a lock's history is judged by: an acquire and an end for each grant.
//
// A long history is cut after a grant, where the known holders are the state of the lock. A later
// acquire that is open there returns with a lock that is held then: if it was before the cut, nothing
// that conflicts with it was between, and it may as well be at the cut. That is not so of one that
// only touches the lock, and no cut is made while one is open. A holder that is not known to hold
// the lock at the cut may have ended before, and does.
func (l *lock) parts(most int) []part {
	granted := l.granted()
	touched := make([]int64, len(granted)) // when the first touch of the later ones was asked for
	first := int64(never)
	for i, q := range slices.Backward(granted) {
		touched[i] = first
		if !q.held() {
			first = min(first, q.ask.Mono)
		}
	}

	var all []part
	var operations []porcupine.Operation
	var holders []*request // that are known to hold the lock at the last grant
	state, begin := lockState{}, lockState{}
	add := func(q *request, does action, call, end int64) {
		in := step{does: does, who: q.String(), caller: q.caller(), shared: q.ask.Shared, token: q.token}
		if l.kind == history.Permit {
			in.limit, in.token = q.ask.Limit, 0 // each permit has tokens of its own
		}
		operations = append(operations, porcupine.Operation{Input: in, Call: call, Return: end})
	}
	end := func(q *request) { add(q, ends, q.heldUntil, max(q.heldUntil, q.ended)) }
	cut := func() {
		all = append(all, part{fmt.Sprintf("%s part %d", l, len(all)+1), model(begin, stepLock), operations})
		operations = nil
	}
	for i, q := range granted {
		holders = slices.DeleteFunc(holders, func(o *request) bool {
			if o.heldUntil <= q.answered {
				end(o)
				return true
			}
			return false
		})
		if q.held() {
			holders = append(holders, q)
			add(q, acquires, q.ask.Mono, q.answered)
		} else {
			add(q, touches, q.ask.Mono, q.answered)
		}
		if l.kind != history.Permit {
			state.token = max(state.token, q.token)
			if !q.ask.Shared {
				state.writerToken = max(state.writerToken, q.token)
			}
		}
		last := i == len(granted)-1 || granted[i+1].answered > q.answered
		if len(operations) >= most && last && touched[i] > q.answered {
			cut()
			begin = state
			for _, o := range holders {
				if o.ask.Shared || o.ask.Limit > 0 {
					begin.readers++
				} else {
					begin.writers++
				}
			}
		}
	}
	for _, q := range holders {
		end(q)
	}
	if len(operations) > 0 {
		cut()
	}
	return all
}

// firsts returns the claims of each key, and the runs of each period.
func firsts(r *run) []part {
	type taken struct {
		kind        history.Kind
		key, period string
	}
	found := map[taken][]porcupine.Operation{}
	first := map[taken]bool{} // whether one is known to be the first
	open := map[taken][]porcupine.Operation{}
	var order []taken
	for _, q := range r.requests {
		if q.ask.Kind != history.Claim && q.ask.Kind != history.Once {
			continue
		}
		t := taken{q.ask.Kind, q.ask.Key, q.period}
		o := porcupine.Operation{Call: q.ask.Mono, Return: q.answered}
		does := may
		switch {
		case q.answer == history.Refused && q.ask.Kind == history.Once && q.period == "":
			continue
		case q.answer == history.Refused:
			does = finds
		case q.answer == history.Withdrawn || q.end == history.RolledBack:
			continue
		case q.ask.Kind == history.Once && q.granted():
			does = takes
		case q.end == history.Committed:
			does, o.Return = takes, q.ended
		default:
			o.Return = never
		}
		o.Input = step{does: does, who: q.String(), caller: q.caller()}
		if does == may {
			open[t] = append(open[t], o)
			continue
		}
		if found[t] == nil {
			order = append(order, t)
		}
		found[t] = append(found[t], o)
		first[t] = first[t] || does == takes
	}
	var all []part
	for _, t := range order {
		operations := found[t]
		if !first[t] { // where one is, those without an answer came after it, or did nothing
			operations = append(operations, open[t]...)
			if t.period != "" {
				operations = append(operations, open[taken{t.kind, t.key, ""}]...) // of a run that may be any
			}
		}
		all = append(all, part{strings.TrimSpace(fmt.Sprintf("%s %q %s", t.kind, t.key, t.period)), model(false, stepFirst), operations})
	}
	return all
}
