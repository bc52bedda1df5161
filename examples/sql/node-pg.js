// Settles invoice 42 under a lease, with node-postgres.
const { randomUUID } = require('crypto')
const os = require('os')
const { Client } = require('pg')

const name = 'invoice:42'
const holder = `${os.hostname()}:${process.pid}:${randomUUID()}`

async function main() {
  // One connection for the transaction below: each pool.query() may take another one.
  // It commits each statement outside of BEGIN and COMMIT.
  const client = new Client()
  await client.connect()
  const value = async (sql, ...args) => (await client.query({ text: sql, values: args, rowMode: 'array' })).rows[0][0]

  try {
    const acquired = await value('SELECT acquire_lock($1, $2, 60)', name, holder)
    if (!acquired) {
      console.log('busy: %o', acquired)
      return
    }
    try {
      const total = await value('SELECT invoice_total(42)') // slow
      await client.query('BEGIN')
      try {
        await value('SELECT assert_lock_held($1, $2)', name, holder)
        await client.query('UPDATE invoices SET total = $1 WHERE id = 42', [total])
        await client.query('COMMIT')
      } catch (e) {
        await client.query('ROLLBACK')
        throw e
      }
      console.log('settled')
    } catch (e) {
      if (e.code !== 'LK001') throw e
      console.log('lost')
    } finally {
      await value('SELECT release_lock($1, $2)', name, holder)
      await value('SELECT wake_lock_waiter($1)', name)
    }
  } finally {
    await client.end()
  }
}

main()
