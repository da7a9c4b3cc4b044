//! How releases are handled: what is waited for and said meanwhile, and how many revisions are kept.

use anyhow::{Result, bail, ensure};
use krypton_tests::{
    ChartRepository, ChartSource, Gate, Mode, Pair, Parts, eventually,
    fleet::{Desk, PATIENCE, ValuesFile, chart_flags, condition, values_flag},
    gate,
};
use serde_json::json;

const ALL_READY: (&str, &str, &str) = ("Ready", "True", "AllClustersReady");

/// Waits until a condition of Tenant acme has this status, and a message with these words.
async fn says(desk: &Desk, kind: &str, status: &str, words: &str) -> String {
    let what = format!("{kind} to be {status} and to say {words:?}");
    eventually(&what, PATIENCE, async || {
        let tenant = desk.tenants("default").get("acme").await?;
        let conditions = tenant.status.unwrap_or_default().conditions;
        match condition(&conditions, kind) {
            Some(found) if found.status == status && found.message.contains(words) => {
                Ok(Some(found.message.clone()))
            }
            found => bail!("{found:?}"),
        }
    })
    .await
    .unwrap()
}

/// Waits until the newest revision is `at_least` and `status`; at no time may there be more than `most`.
async fn piles_up(desk: &Desk, workspace: &str, release: &str, at_least: u32, most: usize) {
    let what = format!("revision {at_least} of {release}");
    let enough = eventually(&what, PATIENCE, async || {
        let revisions = desk.revisions(workspace, release).await?;
        let newest = revisions.last().map_or(0, |(number, _)| *number);
        Ok((revisions.len() > most || newest >= at_least).then_some(revisions))
    });
    let revisions = enough.await.unwrap();
    assert!(revisions.len() <= most, "{revisions:?}");
}

async fn open(pair: &mut Pair, flags: Vec<String>, more: &[&str]) -> Result<()> {
    let more = more.iter().map(|flag| (*flag).to_owned());
    pair.open(flags.into_iter().chain(more)).await.map(drop)
}

#[tokio::test]
async fn what_is_waited_for_is_said_what_is_not_is_ready_and_so_many_revisions_are_kept() {
    let gate = Gate::everywhere().unwrap();
    let charts = [gate.chart(), ChartSource::small("1.0.0")];
    let repository = ChartRepository::start(&charts).await.unwrap();
    let mut pair = Pair::start("handling", Mode::SelfCluster, Parts::WithControllers)
        .await
        .unwrap();
    let desk = pair.desk();
    let values = ValuesFile::new(&json!({"gates": ["pre-install"]}).to_string()).unwrap();
    let flags = |chart: &str| {
        let mut flags = chart_flags(&repository, chart, "1.0.0");
        flags.push(values_flag(&values));
        flags
    };
    let (release, ready) = (pair.release("acme"), pair.condition("ClusterReady"));
    let progress = pair.condition("ClusterProgress");

    // Nobody makes a pod available here: it is never ready, and it is said what for.
    open(&mut pair, flags("gates"), &[]).await.unwrap();
    desk.create("default", "acme", json!({})).await.unwrap();
    let hook = gate::at(&desk, "acme", "pre-install", None).await.unwrap();
    let waits = format!("installing release: waiting for hook Pod acme/{release}-pre-install");
    says(&desk, &progress, "True", &waits).await;
    says(&desk, &ready, "False", &waits).await;
    gate::open(&desk, "acme", &hook).await.unwrap();
    let lacks = format!("Deployment acme/{release}: 0 of 1 available");
    says(&desk, &progress, "True", &lacks).await;
    let starts = desk.events("default", "acme").await.unwrap();
    assert_eq!(starts.get("HelmInstallStart"), Some(&1), "{starts:?}");
    pair.stop().await.unwrap();

    open(&mut pair, flags("gates"), &["--wait=hooks"])
        .await
        .unwrap();
    desk.shows("default", "acme", &[ALL_READY]).await.unwrap();
    says(&desk, &ready, "True", &format!("; not waited for: {lacks}")).await;
    pair.stop().await.unwrap();

    open(&mut pair, flags("gates"), &["--wait=none"])
        .await
        .unwrap();
    let said = eventually("no word of workloads", PATIENCE, async || {
        let said = says(&desk, &ready, "True", "; not waited for").await;
        Ok((!said.contains("Deployment")).then_some(said))
    });
    assert!(said.await.unwrap().ends_with("; not waited for"));
    desk.newest_is("acme", &release, 1, "deployed")
        .await
        .unwrap();
    pair.stop().await.unwrap();

    let kept = ["--wait=none", "--history-max=2"];
    values.write("{replicaCount: 0, message: m1}").unwrap();
    open(&mut pair, flags("small"), &kept).await.unwrap();
    for number in 2..=5 {
        let message = format!("{{replicaCount: 0, message: m{number}}}");
        values.write(&message).unwrap();
        piles_up(&desk, "acme", &release, number, 2).await;
    }
    desk.shows("default", "acme", &[ALL_READY]).await.unwrap();
    let deployed = desk.revisions("acme", &release).await.unwrap();
    let newest = deployed.last().unwrap().0;

    // What fails again and again piles up no more, whether something runs already or nothing does.
    values.write("{replicaCount: 0, broken: true}").unwrap();
    desk.create("default", "beta", json!({})).await.unwrap();
    piles_up(&desk, "acme", &release, newest + 3, 2).await;
    piles_up(&desk, "beta", &pair.release("beta"), 4, 2).await;
    eventually("what was deployed to be there", PATIENCE, async || {
        let revisions = desk.revisions("acme", &release).await?;
        ensure!(
            revisions.contains(&(newest, "deployed".to_owned())),
            "{revisions:?}"
        );
        Ok(Some(()))
    })
    .await
    .unwrap();
    pair.stop().await.unwrap();
}
