//! Adds a fault to a plan at each write and at each kind of read, one run at a time.

use std::collections::BTreeMap;
use std::io;

use crate::coverage::request_kind;
use crate::observe::Event;
use crate::plan::{Action, Plan, RequestFault};
use crate::run::run;

/// Time until a program that was killed starts again, in milliseconds.
const RESTART: u64 = 1_000;

/// Returns copies of the plan with one request fault each. The first and the last write of each object that a host
/// sends fail, lose their responses, and kill the host. The same applies to the first and the last read of each
/// resource.
///
/// # Errors
/// Returns an error if the plan itself fails, or the machine has no room for the simulation's files.
pub fn request_fault_plans(plan: &Plan) -> io::Result<Vec<Plan>> {
    let mut requests: BTreeMap<(String, String, String), (u32, u32)> = BTreeMap::new();
    let outcome = run(plan, &mut |observation| {
        if let Event::Responded {
            host,
            nth,
            cluster,
            method,
            path,
            ..
        } = &observation.event
        {
            let request = match method.as_str() {
                "GET" => request_kind(method, path),
                _ => format!("{method} {path}"),
            };
            let key = (host.clone(), cluster.clone(), request);
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
            let crash = RequestFault::Crash { restart: RESTART };
            plans.extend(
                [crash, RequestFault::Fail, RequestFault::LoseResponse].map(|fault| {
                    let mut faulty_plan = plan.clone();
                    faulty_plan.settings.at_start = Some(Action::AtRequest {
                        host: host.clone(),
                        nth,
                        fault,
                    });
                    faulty_plan
                }),
            );
        }
    }
    Ok(plans)
}
