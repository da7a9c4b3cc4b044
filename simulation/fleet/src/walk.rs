//! Strikes a plan at each write and at each kind of read, one run at a time.

use std::collections::BTreeMap;
use std::io;

use crate::coverage::call;
use crate::observe::Event;
use crate::plan::{Action, Plan, Strike};
use crate::run::run;

/// Time until a program that was killed starts again, in milliseconds.
const RESTART: u64 = 1_000;

/// Returns the plan with one strike each. The first and the last write of each object that a host sends fail, lose their
/// answers, and kill the host. So do the first and the last read of each resource.
///
/// # Errors
/// Returns an error if the plan itself fails, or the machine has no room for the simulation's files.
pub fn strikes(plan: &Plan) -> io::Result<Vec<Plan>> {
    let mut requests: BTreeMap<(String, String, String), (u32, u32)> = BTreeMap::new();
    let outcome = run(plan, &mut |seen| {
        if let Event::Answered {
            host,
            nth,
            cluster,
            method,
            path,
            ..
        } = &seen.event
        {
            let what = match method.as_str() {
                "GET" => call(method, path),
                _ => format!("{method} {path}"),
            };
            let key = (host.clone(), cluster.clone(), what);
            let (first, last) = requests.entry(key).or_insert((*nth, *nth));
            *first = (*first).min(*nth);
            *last = (*last).max(*nth);
        }
    })?;
    if let Some(violation) = outcome.violation {
        return Err(io::Error::other(format!("without a strike: {violation}")));
    }
    let mut plans = Vec::new();
    for ((host, ..), (first, last)) in requests {
        let mut numbers = vec![first, last];
        numbers.dedup();
        for nth in numbers {
            let crash = Strike::Crash { restart: RESTART };
            plans.extend([crash, Strike::Fail, Strike::LoseAnswer].map(|strike| {
                let mut struck = plan.clone();
                struck.settings.at_start = Some(Action::AtRequest {
                    host: host.clone(),
                    nth,
                    strike,
                });
                struck
            }));
        }
    }
    Ok(plans)
}
