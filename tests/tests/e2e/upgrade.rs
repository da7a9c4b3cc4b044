//! Shows that chart changes reach every member, and that an impossible change leaves running releases in place.

use anyhow::{Result, ensure};
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Fault, Hub, HubOptions, Membership, Mode, Pair, Parts,
    TestResult, assert_contains, by_agent, eventually,
    fleet::{ALL_READY, FleetClient, ValuesFile, chart_flags, values_flag},
};
use serde_json::json;

by_agent!(
    upgrades_reach_all_members_and_failure_keeps_release,
    unavailable_chart_is_reported_without_touching_releases
);

async fn check_available(cluster: &Cluster, release: &str) -> Result<()> {
    let wait = "wait --for=condition=Available -n acme --timeout=60s";
    let wait = format!("{wait} deployment/{release}");
    cluster.kubectl_line(&wait).await.map(drop)
}

async fn upgrades_reach_all_members_and_failure_keeps_release(mode: Mode) -> TestResult {
    let versions = [ChartSource::small("1.0.0"), ChartSource::small("1.1.0")];
    let repository = ChartRepository::start(&versions).await?;
    let (home, edge) = tokio::try_join!(
        Cluster::start("upgrade-home", Parts::WithPods),
        Cluster::start("upgrade-edge", Parts::WithPods),
    )?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let values = ValuesFile::new("message: first")?;
    let options = |version: &str| {
        let flags = chart_flags(&repository, "small", version);
        HubOptions::new(home.kubeconfig())
            .args(flags)
            .args([values_flag(&values)])
    };
    let mut hub = Hub::start(&options("1.0.0"))?;
    let _member = Membership::join(mode, &mut hub, &home, &edge, "edge-1").await?;
    fleet_client.create("acme", json!({})).await?;
    at_edge.create("acme", json!({})).await?;
    let places = [
        (&home, &fleet_client, "tenant-acme-self-cluster"),
        (&edge, &at_edge, "tenant-acme-edge-1"),
    ];
    for (_, fleet_client, release) in places {
        fleet_client.wait_ready("acme").await?;
        fleet_client.wait_deployed("acme", release, 1).await?;
    }

    values.write("message: second")?;
    for (_, fleet_client, release) in places {
        fleet_client.wait_deployed("acme", release, 2).await?;
        let message = fleet_client.message("acme", release).await?;
        assert_eq!(message.as_deref(), Some("second"));
    }
    let upgraded = [
        ALL_READY,
        ("ClusterReady/self-cluster", "True", "Upgraded"),
        ("ClusterReady/edge-1", "True", "Upgraded"),
        ("ClusterProgress/edge-1", "False", "UpgradeComplete"),
    ];
    fleet_client.wait_for("acme", &upgraded).await?;
    for reason in ["HelmUpgradeStart", "HelmUpgraded"] {
        at_edge.event_message("acme", reason).await?;
    }

    hub.stop().await?;
    let _hub = Hub::start(&options("1.1.0").on_port_of(&hub))?;
    let applied = format!("{}/small:1.1.0", repository.url());
    for (_, fleet_client, release) in places {
        fleet_client.wait_deployed("acme", release, 3).await?;
        eventually("the new version in the status", async || {
            let tenant = fleet_client.tenants().get("acme").await?;
            let applied_chart = tenant.status.unwrap_or_default().last_applied_chart;
            Ok((applied_chart.as_ref() == Some(&applied)).then_some(()))
        })
        .await?;
        fleet_client.wait_ready("acme").await?;
    }

    values.write("{message: second, broken: true}")?;
    let failed = [
        ("Ready", "False", "ClustersNotReady"),
        ("ClusterReady/edge-1", "False", "UpgradeFailed"),
        ("ClusterError/edge-1", "True", "UpgradeFailed"),
    ];
    let tenant = at_edge.wait_for("acme", &failed).await?;
    assert_eq!(tenant.status.unwrap().phase.as_deref(), Some("Error"));
    let on_home = ("ClusterError/self-cluster", "True", "UpgradeFailed");
    let tenant = fleet_client.wait_for("acme", &[on_home, failed[2]]).await?;
    let status = tenant.status.unwrap();
    assert_eq!(status.phase.as_deref(), Some("Error"));
    let message = status.last_message.unwrap();
    assert_contains!(message, "0 of 2 clusters ready", "keeps running");
    at_edge.event_message("acme", "HelmUpgradeFailed").await?;
    for (cluster, fleet_client, release) in places {
        check_available(cluster, release).await?;
        let revisions = fleet_client.revisions("acme", release).await?;
        assert!(
            revisions.contains(&(3, "deployed".to_owned())),
            "{revisions:?}"
        );
    }

    values.write("message: third")?;
    for (cluster, fleet_client, release) in places {
        fleet_client.wait_ready("acme").await?;
        let message = fleet_client.message("acme", release).await?;
        assert_eq!(message.as_deref(), Some("third"));
        check_available(cluster, release).await?;
    }

    // A failed rollout is not ready, although the old pods are.
    values.write("{message: third, unready: true}")?;
    let lacks =
        "Deployment acme/tenant-acme-self-cluster: 0 of 1 new ones available, 1 old ones left";
    for (kind, status, text) in [
        ("ClusterProgress", "True", lacks),
        ("ClusterReady", "False", ""),
    ] {
        let kind = format!("{kind}/self-cluster");
        let waiting = fleet_client.wait_for_condition("acme", &kind, |found| {
            found.status == status && found.message.contains(text)
        });
        waiting.await?;
    }
    values.write("message: fourth")?;
    for (_, fleet_client, _) in places {
        fleet_client.wait_ready("acme").await?;
    }
    Ok(())
}

async fn unavailable_chart_is_reported_without_touching_releases(mode: Mode) -> TestResult {
    let repository = ChartRepository::start(&[ChartSource::small("1.0.0")]).await?;
    let mut pair = Pair::start("no-chart", mode, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let values = ValuesFile::new("replicaCount: 0")?;
    // Restart the agent together with its hub, because a running agent has the chart in its cache.
    let flags = |version: &str| {
        let mut flags = chart_flags(&repository, "small", version);
        flags.push(values_flag(&values));
        flags
    };
    let [ready, error] = ["ClusterReady", "ClusterError"].map(|kind| pair.condition(kind));
    pair.start_hub_and_join(flags("1.0.0")).await?;
    fleet_client.install("old").await?;
    pair.stop().await?;
    let running = fleet_client.releases().await?;

    let faults = [
        ("9.9.9", "VersionNotFound"),
        ("latest-and-greatest", "VersionInvalid"),
    ];
    for (version, reason) in faults {
        pair.start_hub_and_join(flags(version)).await?;
        let refused = (error.as_str(), "True", reason);
        let still = (ready.as_str(), "True", "Installed");
        // An agent keeps its current chart until the hub sends another one.
        fleet_client.wait_for("old", &[refused, still]).await?;
        if version == "9.9.9" {
            fleet_client.create("new", json!({})).await?;
        }
        let new = fleet_client.wait_for("new", &[refused]).await?;
        let status = new.status.unwrap();
        assert_eq!(status.phase.as_deref(), Some("Error"));
        let message = status.last_message.unwrap();
        assert_contains!(message, "small", version);
        assert_eq!(fleet_client.releases().await?, running, "{version}");
        pair.stop().await?;
    }
    fleet_client
        .event_message("new", "ChartVersionNotFound")
        .await?;
    fleet_client
        .event_message("new", "ChartVersionInvalid")
        .await?;

    // With chart skipping allowed, the phase isn't an error, but the condition still reports the cause.
    pair.set_hub_env(&[("ALLOW_CHART_SKIP", "true")]);
    pair.start_hub_and_join(flags("9.9.9")).await?;
    eventually("phases without the error", async || {
        let refused = [(error.as_str(), "True", "VersionNotFound")];
        for (name, phase) in [("old", "Ready"), ("new", "Pending")] {
            let tenant = fleet_client.wait_for(name, &refused).await?;
            let found = tenant.status.and_then(|status| status.phase);
            ensure!(found.as_deref() == Some(phase), "{name} is {found:?}");
        }
        Ok(Some(()))
    })
    .await?;
    pair.stop().await?;
    pair.set_hub_env(&[]);

    // Several faults in sequence block the same Tenant, and the hub recovers from each.
    repository.set_fault(Fault::Down(503));
    pair.start_hub_and_join(flags("1.0.0")).await?;
    let not_loaded = (error.as_str(), "True", "ChartNotLoaded");
    let faults = [
        (Fault::Down(503), "503"),
        (Fault::Rubbish, "not the index of a chart repository"),
        (Fault::HugeIndex, "larger than"),
    ];
    for (fault, expected_text) in faults {
        repository.set_fault(fault);
        eventually(&format!("{fault:?} to be reported"), async || {
            let new = fleet_client.wait_for("new", &[not_loaded]).await?;
            let message = new
                .status
                .unwrap_or_default()
                .last_message
                .unwrap_or_default();
            ensure!(message.contains(expected_text), "{message}");
            Ok(Some(()))
        })
        .await?;
        let rss = pair.actor()?.rss_bytes()?;
        assert!(rss < 400 << 20, "{fault:?}: {rss} bytes");
        assert_eq!(fleet_client.releases().await?, running, "{fault:?}");
    }
    // An installed release needs no repository.
    let settled = [ALL_READY, (error.as_str(), "False", "NoError")];
    fleet_client.wait_for("old", &settled).await?;
    repository.set_fault(Fault::None);
    fleet_client.wait_ready("new").await?;
    fleet_client
        .wait_deployed("old", &pair.release("old"), 1)
        .await?;
    pair.stop().await?;
    Ok(())
}
