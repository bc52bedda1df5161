// Waits in turn for a lease, with node-postgres.
const { randomUUID } = require('crypto')
const os = require('os')
const { setTimeout } = require('timers/promises')
const { Client } = require('pg')

const name = 'invoice:42'
const holder = `${os.hostname()}:${process.pid}:${randomUUID()}`

async function acquireInTurn(db, name, holder) {
  const call = 'SELECT acquired, fencing_token, ticket, ask_again_ms FROM acquire_in_turn($1, $2, 60, $3)'
  for (let ticket = null; ;) {
    const row = (await db.query(call, [name, holder, ticket])).rows[0]
    if (row.acquired) return row.fencing_token
    ticket = row.ticket
    await setTimeout(row.ask_again_ms)
  }
}

async function main() {
  const db = new Client() // a Pool will do as well
  await db.connect()
  try {
    const token = await acquireInTurn(db, name, holder)
    console.log('acquired with token ' + token)
    await db.query('SELECT release_lock($1, $2)', [name, holder])
    await db.query('SELECT wake_lock_waiter($1)', [name])
  } finally {
    await db.end()
  }
}

main()
