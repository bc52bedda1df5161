package judge

import (
	"fmt"

	"github.com/anishathalye/porcupine"
)

// A step is an operation of a model, with its result.
type step struct {
	does   action
	who    string // the request
	caller string
	shared bool
	limit  int   // of a permit: how many there are
	token  int64 // 0: none
}

// An action is what an operation does.
type action string

const (
	acquires action = "acquires"
	ends     action = "ends"    // releases, or loses what it has acquired
	touches  action = "touches" // acquires, and may have lost it again before it knew

	takes action = "takes" // a claim or a run that is the first
	finds action = "finds" // one that another has taken before
	may   action = "may"   // one without an answer
)

// A lockState is a lock with writers and readers, or a semaphore of which readers have permits.
// Each end follows its own acquire in time, so that it need not be said whose it is.
type lockState struct {
	writers, readers int
	token            int64 // the greatest that was given out
	writerToken      int64 // the greatest that a writer had
}

// stepLock says whether a step is possible in a state, and what the state is after it.
func stepLock(s lockState, in step) (bool, lockState) {
	reads := in.shared || in.limit > 0
	if in.does == ends {
		if reads {
			s.readers--
		} else {
			s.writers--
		}
		return s.readers >= 0 && s.writers >= 0, s
	}
	free, above := s.writers == 0 && s.readers == 0, s.token
	switch {
	case in.limit > 0:
		free = s.readers < in.limit
	case in.shared:
		free, above = s.writers == 0, s.writerToken
	}
	if !free || in.token != 0 && in.token <= above {
		return false, s
	}
	s.token = max(s.token, in.token)
	if !reads {
		s.writerToken = max(s.writerToken, in.token)
	}
	switch {
	case in.does == touches:
	case reads:
		s.readers++
	default:
		s.writers++
	}
	return true, s
}

// stepFirst is the same of a claim, or a run of a period: a state is whether it is taken.
func stepFirst(taken bool, in step) (bool, bool) {
	switch in.does {
	case takes:
		return !taken, true
	case finds:
		return taken, taken
	default:
		return true, true
	}
}

// model makes a model for porcupine of a first state and of steps.
func model[S comparable](first S, next func(S, step) (bool, S)) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return first },
		Step: func(state, in, _ any) (bool, any) {
			ok, s := next(state.(S), in.(step))
			return ok, s
		},
		DescribeOperation: func(in, _ any) string {
			s := in.(step)
			text := fmt.Sprintf("%s %s", s.who, s.does)
			if s.shared {
				text += ", shared"
			}
			if s.token != 0 {
				text += fmt.Sprintf(", token %d", s.token)
			}
			return text
		},
		DescribeState: func(state any) string { return fmt.Sprintf("%+v", state) },
	}
}
