package main

import (
	"errors"
	"time"
)

// usage is the processor time that an op took: this process, with all that runs in
// it beside the op, and the processes of the server that the op asks.
type usage struct{ client, server time.Duration }

func (u usage) plus(other usage) usage {
	return usage{u.client + other.client, u.server + other.server}
}

// countUsage begins to count what this process uses, and the process server with its
// children: those that live, and those that have ended. What it returns ends that. To
// look through all processes takes this one milliseconds, which are outside its count.
func countUsage(server int) (ended func() (usage, error), err error) {
	serverBefore, err := familyTime(server)
	if err != nil {
		return nil, err
	}
	before, err := ownTime()
	if err != nil {
		return nil, err
	}
	return func() (usage, error) {
		after, errOwn := ownTime()
		serverAfter, err := familyTime(server)
		return usage{client: after - before, server: serverAfter - serverBefore}, errors.Join(errOwn, err)
	}, nil
}
