//! Compares a real API server with the recorded transcripts that the simulated one must reproduce.

mod real;

use std::collections::BTreeMap;

use anyhow::anyhow;
use krypton_sim_apiserver::conformance::{cases, recorded};
use krypton_tests::{Cluster, Parts, TestResult};
use tokio::runtime::Runtime;

use real::RealServer;

/// The harness of the transcripts is synchronous, so this test has no runtime.
#[test]
fn real_server_answers_as_recorded() -> TestResult {
    let runtime = Runtime::new()?;
    let cluster = runtime.block_on(Cluster::start("conformance", Parts::WithControllers))?;
    let client = runtime.block_on(async { cluster.client() });
    let mut server = RealServer::new(&runtime, client);
    let write = std::env::var_os("WRITE_CONFORMANCE").is_some();
    let before = recorded::read().map_err(|failure| anyhow!(failure))?;
    let mut differing = Vec::new();
    let mut after: BTreeMap<&str, recorded::Topic> = BTreeMap::new();
    for case in cases() {
        let transcript = case.run(&mut server);
        differing.extend(recorded::difference(&case, &before, &transcript));
        after
            .entry(case.topic)
            .or_default()
            .insert(case.name.to_owned(), transcript);
    }
    if write {
        for (topic, transcripts) in after {
            recorded::write(topic, &transcripts).map_err(|failure| anyhow!(failure))?;
        }
        return Ok(());
    }
    let count = differing.len();
    assert!(
        differing.is_empty(),
        "{}\n{count} cases differ; if the difference is intended, rewrite the transcripts with \
         WRITE_CONFORMANCE=1",
        differing.join("\n")
    );
    Ok(())
}
